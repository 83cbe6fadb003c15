"""Recording of episodes in terms of observation and action spaces."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from maze.core.annotations import override
from maze.core.env.maze_env import MazeEnv
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.trajectory_recording.records.trajectory_record import SpacesTrajectoryRecord
from maze.core.trajectory_recording.writers.trajectory_writer_file import TrajectoryWriterFile
from maze.core.wrappers.wrapper import Wrapper


class SpacesRecordingWrapper(Wrapper[MazeEnv[Any]]):
    """Records what the agent observes, does and gets, as it passes this wrapper, and writes one file per episode.

    One :class:`StructuredSpacesRecord` per environment step, with a record for each sub-step. An episode is written
    when it is over, or when it is left by a reset or by closing the environment; not where it was cloned from another
    environment.

    :param env: Environment to record.
    :param output_dir: Directory of the files; None: episodes are only kept in `episode_record`.
    """

    keeps_observations_and_actions = True

    def __init__(self, env: MazeEnv[Any], output_dir: str | None = "space_records") -> None:
        super().__init__(env)
        self.episode_record: SpacesTrajectoryRecord | None = None
        """The current episode, until the next one begins."""
        self._writer = None if output_dir is None else TrajectoryWriterFile(Path(output_dir).absolute())
        self._is_written = False
        self._observation: Any = None
        self._step = StructuredSpacesRecord()

    @override(Wrapper)
    def step(self, action: Any) -> tuple[Any, Any, bool, dict[Any, Any]]:
        env = self.env
        env.context.pre_step()  # also for sub-steps that a wrapper answers without stepping the environment
        actor_id = env.actor_id()
        taken = copy.deepcopy(action)
        observation, reward, done, info = self._env_step(action)
        record = SpacesRecord(actor_id, self._observation, taken, reward, done, copy.deepcopy(info))
        record.next_observation = self._observation = copy.deepcopy(observation)
        self._step.append(record)
        if self.episode_record is not None and (done or env.context.is_step_complete):
            self.episode_record.append(self._step)
            self._step = StructuredSpacesRecord()
            if done:
                self.publish_trajectory()
        return observation, reward, done, info

    @override(Wrapper)
    def reset(self) -> Any:
        self.publish_trajectory()
        observation = self._env_reset()
        self._observation = copy.deepcopy(observation)
        self._step = StructuredSpacesRecord()
        self.episode_record = SpacesTrajectoryRecord(self.env.get_episode_id())
        self._is_written = False
        return observation

    def publish_trajectory(self) -> None:
        """Writes the current episode, once, if it is the environment's own and has any steps."""
        record = self.episode_record
        if self._writer is None or self._is_written or record is None or not record.step_records:
            return
        if self.env.context.is_copied:
            return
        self._writer.write(record)  # type: ignore[arg-type]  # it stores any record with an id
        self._is_written = True

    def close(self) -> None:
        """Writes an episode that was not finished, and closes the environment."""
        self.publish_trajectory()
        self.env.close()

    @override(Wrapper)
    def clone_from(self, env: SpacesRecordingWrapper) -> None:
        """Takes over the state, and the recording up to here."""
        super().clone_from(env)
        self._observation = copy.deepcopy(env._observation)
        self._step = copy.deepcopy(env._step)
        self._is_written = env._is_written
        self.episode_record = None
        if env.episode_record is not None:
            self.episode_record = SpacesTrajectoryRecord(env.episode_record.id)
            self.episode_record.extend(env.episode_record)
