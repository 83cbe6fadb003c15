"""Replays recorded episodes: under another reward, and with another decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from maze.core.annotations import override
from maze.core.env.maze_env import MazeEnv
from maze.core.env.reward import RewardAggregatorInterface
from maze.core.errors import ConfigError
from maze.core.log_events.kpi_calculator import KpiCalculator
from maze.core.rollout.recording import TRAJECTORY_DIR
from maze.core.trajectory_recording.datasets.in_memory_dataset import InMemoryDataset
from maze.core.trajectory_recording.records.trajectory_record import StateTrajectoryRecord, load_trajectories
from maze.core.trajectory_recording.writers.trajectory_writer_file import TrajectoryWriterFile
from maze.core.utils.config_utils import whole_number
from maze.core.utils.factory import ConfigType, Factory
from maze.core.utils.seeding import MazeSeeding
from maze.core.wrappers.recording_wrapper import with_frames
from maze.evaluation.comparison_page import comparison_page
from maze.evaluation.comparison_runner import (
    COMPARISON_FILE,
    EPISODES_FILE,
    PAGE_FILE,
    env_and_policy,
    trainings_of,
    write_files,
)
from maze.evaluation.replay import reward_replay, what_if
from maze.runner import Runner

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from maze.core.agent.policy import Policy

WHAT_IF_FILE = "what_if.html"
_PLACEHOLDER = {"_target_": "maze.core.agent.random_policy.RandomPolicy"}
"""Stands for the policy where none is needed."""


@dataclass
class ReplayRunner(Runner):
    """Replays recorded episodes.

    :param trajectory_data: A file of trajectories, or a directory of such files.
    :param reward_aggregator: Computes returns anew, from the recorded events; `None`: they stay as they are.
    :param kpi_calculator: Computes KPIs anew; `None`: the environment's own does.
    :param what_if: `step`, `substep`, `action`, `policy`: see `maze.evaluation.replay.what_if`.
    :param allow: Types of the user's own that the files may hold, by full name or pattern.
    :param input_dir: Directory that the wrappers and the recorded policy read their files from.
    :param max_episode_steps: Steps after which an episode is cut off; 0: never.
    :param deterministic: Take the most probable actions.
    :param n_recorded: How many episodes the recorded rollout had, whose seeds follow from those of `seeding`.
    :param versions: How versions differ from those of the record, for messages.
    :param every_k_states: Draw only every so many states of what-if pages.
    """

    trajectory_data: str
    reward_aggregator: ConfigType = None
    kpi_calculator: ConfigType = None
    what_if: ConfigType = None
    allow: Any = ()
    input_dir: str = ""
    max_episode_steps: int = 0
    deterministic: bool = True
    n_recorded: int = 1
    versions: str = ""
    every_k_states: int = 1

    def __post_init__(self) -> None:
        changes: Any = self.what_if or {}
        self._change: dict[str, Any] = dict(changes)
        self.max_episode_steps = whole_number("runner.max_episode_steps", self.max_episode_steps or 0, at_least=0)
        self.every_k_states = whole_number("runner.every_k_states", self.every_k_states, at_least=1)
        for name in ("step", "substep"):
            if self._change.get(name) is not None:
                self._change[name] = whole_number(f"what_if.{name}", self._change[name], at_least=0)
        if self._change.get("step") is None and self.reward_aggregator is None and self.kpi_calculator is None:
            raise ConfigError(
                "Nothing is to be replayed: name a reward_aggregator, a kpi_calculator, or what_if.step with "
                "what_if.action or what_if.policy."
            )

    @override(Runner)
    def setup(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        self.maze_seeding = MazeSeeding.configured(cfg.get("seeding"))

    @override(Runner)
    def run(self, **kwargs: Any) -> None:
        env: Any = None
        if self._cfg.get("env"):
            env, _ = self._built({"policy": _PLACEHOLDER, "input_dir": self.input_dir})
        try:
            episodes = self._episodes(env)
            if self.reward_aggregator is not None or self.kpi_calculator is not None:
                self._replay_rewards(episodes, env)
            if self._change.get("step") is not None:
                self._play_on(episodes, env)
        finally:
            if env is not None:
                env.close()

    def _episodes(self, env: MazeEnv[Any] | None) -> list[StateTrajectoryRecord]:
        episodes: list[StateTrajectoryRecord] = []
        for file in InMemoryDataset.list_trajectory_files(self.trajectory_data):
            for found in load_trajectories(file, False, tuple(self.allow or ()), (), "allow=['<type>']", env):
                loaded: Any = found
                if not isinstance(loaded, StateTrajectoryRecord) or not loaded.step_records:
                    raise ConfigError(f"{file}: expected episodes in terms of states, found a {type(loaded).__name__}.")
                episodes.append(loaded)
        return episodes

    def _replay_rewards(self, episodes: list[StateTrajectoryRecord], env: MazeEnv[Any] | None) -> None:
        def built(kind: Any, name: str, config: Any) -> Any:
            return None if config is None else Factory(kind).instantiate(config, config_path=name)

        aggregator = built(RewardAggregatorInterface, "reward_aggregator", self.reward_aggregator)
        calculator = built(KpiCalculator, "kpi_calculator", self.kpi_calculator)
        replayed = reward_replay(episodes, aggregator, calculator, env)
        comparison = replayed.comparison
        print(comparison.text(), flush=True)
        page = comparison_page(comparison, datetime.now())
        sections = list(page.sections)
        if replayed.further is not None:
            print(replayed.further.text(), flush=True)
            sections += comparison_page(replayed.further, datetime.now()).sections
        note = " ".join([page.note, *replayed.remarks])
        seeds = [(str(episode.id),) for episode in episodes]
        for remark in replayed.remarks:
            print(f"Note: {remark}", flush=True)
        write_files(
            {
                PAGE_FILE: replace(page, sections=sections, note=note).text(),
                COMPARISON_FILE: comparison.as_csv(),
                EPISODES_FILE: comparison.episodes_as_csv(seeds, ("episode_id",)),
            }
        )

    def _play_on(self, episodes: list[StateTrajectoryRecord], env: Any) -> None:
        if env is None:
            raise ConfigError(
                f"what_if: no run's configuration lies beside {self.trajectory_data}; name the environment that it was "
                f"recorded in, env=<option>, and its wrappers."
            )
        if len(episodes) != 1:
            raise ConfigError(
                f"what_if: {self.trajectory_data} holds {len(episodes)} episodes; name the file of one of them, "
                f"trajectory_data=<file>."
            )
        (episode,) = episodes
        compared = what_if(
            with_frames(env),
            episode,
            self._change["step"],
            self._change.get("action"),
            self._policy(),
            self._change.get("substep") or 0,
            self._agent_seed(episode),
            self.deterministic,
            self.versions,
        )
        print(compared.text(), flush=True)
        title = f"What if? Episode {episode.id}, step {compared.step}"
        page = compared.write_page(WHAT_IF_FILE, title, self.every_k_states)
        TrajectoryWriterFile(TRAJECTORY_DIR).write(compared.other)
        print(f"Both futures are in {page.absolute()}; open it in a browser.", flush=True)

    def _policy(self) -> Policy | None:
        chosen = self._change.get("policy")
        if chosen is None:
            return None
        return self._built(trainings_of(chosen)[0])[1]

    def _agent_seed(self, episode: StateTrajectoryRecord) -> int:
        """The seed that the agent had in the episode, where it can be told; otherwise that of a first episode."""
        seeds = self.maze_seeding.episode_seeds(max(1, self.n_recorded))
        own = None if episode.action_record is None else episode.action_record.seed
        return dict(seeds).get(own, seeds[0][1]) if own is not None else seeds[0][1]

    def _built(self, entry: Mapping[str, Any]) -> tuple[Any, Policy]:
        return env_and_policy(self._cfg, entry, self._cfg.get("wrappers") or {}, self.max_episode_steps)
