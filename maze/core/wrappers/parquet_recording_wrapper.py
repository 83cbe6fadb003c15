"""Recording of episodes as tables."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from typing import Any

from maze.core.annotations import override
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.maze_env import MazeEnv
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.writers.parquet import ParquetColumns, SubstepRow
from maze.core.wrappers.wrapper import Wrapper

_LOGGER = logging.getLogger(__name__)


class ParquetRecordingWrapper(Wrapper[MazeEnv[Any]]):
    """Writes each episode as a table in a Parquet file, `<episode id>.parquet`, with a row for each sub-step.

    :class:`~maze.core.trajectory_recording.writers.parquet.ParquetColumns` says which columns it has. Key performance
    indicators are among them where a `LogStatsWrapper` is inside of this one. An episode is written when it is over,
    or when it is left by a reset or by closing the environment; not where it was cloned from another environment. A
    full disk costs tables and gives one warning.

    :param env: Environment to record.
    :param output_dir: Directory of the files.
    :raises ConfigImportError: pyarrow is missing.
    """

    keeps_observations_and_actions = True

    def __init__(self, env: MazeEnv[Any], output_dir: str | Path = "trajectory_parquet") -> None:
        super().__init__(env)
        self._directory: Path | None = Path(output_dir).absolute()
        self._interfaces: tuple[type[Any], ...] = ()
        self._columns = self._described_columns()
        self._rows: list[SubstepRow] = []
        self._observation: Any = None

    @override(Wrapper)
    def step(self, action: Any) -> tuple[Any, Any, bool, dict[Any, Any]]:
        env = self.env
        env.context.pre_step()  # also for sub-steps that a wrapper answers without stepping the environment
        events = env.context.event_service.records
        n_earlier, time = len(events), env.get_env_time()
        substep = self._rows[-1].substep + 1 if self._rows and self._rows[-1].step == time else 0
        record = SpacesRecord(env.actor_id(), self._observation, copy.deepcopy(action))
        observation, reward, done, info = self._env_step(action)
        record.reward, record.done, record.info = reward, done, dict(info)
        self._observation = copy.deepcopy(observation)
        self._rows.append(SubstepRow(time, substep, record, events[n_earlier:]))
        if done:
            self.publish_trajectory()
        return observation, reward, done, info

    @override(Wrapper)
    def reset(self) -> Any:
        self.publish_trajectory()
        observation = self._env_reset()
        self._observation = copy.deepcopy(observation)
        if self._interfaces != tuple(self.env.context.event_service.topics):  # some are announced by the first reset
            self._columns = self._described_columns()
        return observation

    def publish_trajectory(self) -> None:
        """Writes the current episode, if it is the environment's own and has any steps that are not written."""
        rows, self._rows = self._rows, []
        if not rows or self._directory is None or self.env.context.is_copied:
            return
        episode_id = str(self.env.get_episode_id())
        name = re.sub(r"[^\w.@=+-]", "_", episode_id)
        kpis = self._kpis() if rows[-1].record.done else {}
        try:
            self._columns.write(self._directory / f"{name}.parquet", episode_id, rows, kpis)
        except OSError as error:
            _LOGGER.warning("Episode %s cannot be written (%s); no more tables are.", episode_id, error)
            self._directory = None

    def close(self) -> None:
        """Writes an episode that was not finished, and closes the environment."""
        self.publish_trajectory()
        self.env.close()

    @override(Wrapper)
    def clone_from(self, env: ParquetRecordingWrapper) -> None:
        """Takes over the state, and the recording up to here."""
        super().clone_from(env)
        self._rows, self._observation = list(env._rows), copy.deepcopy(env._observation)

    def _described_columns(self) -> ParquetColumns:
        env = self.env
        self._interfaces = tuple(env.context.event_service.topics)
        return ParquetColumns(env.observation_spaces_dict, env.action_spaces_dict, self._interfaces)

    def _kpis(self) -> dict[str, float]:
        episode_event_log = getattr(self.env, "get_episode_event_log", None)
        if episode_event_log is None:
            return {}
        return {event.name: event.value for event in episode_event_log().query_events(BaseEnvEvents.kpi)}
