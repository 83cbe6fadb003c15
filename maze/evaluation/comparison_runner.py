"""Compares policies: the same episodes for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maze.console.runs import Progress
from maze.core.agent.policy import Policy
from maze.core.annotations import override
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats import LogStats, LogStatsLevel
from maze.core.rollout.rollout_runner import EpisodeSeeds, RolloutRunner
from maze.core.utils.config_utils import whole_number
from maze.core.utils.factory import CollectionOfConfigType
from maze.core.utils.files import write_whole
from maze.core.utils.seeding import MazeSeeding
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.wrapper import RewardWrapper, Wrapper
from maze.evaluation.comparison import LENGTH, RETURN, Comparison, PlayedEpisodes
from maze.evaluation.comparison_page import comparison_page
from maze.runner import Runner

if TYPE_CHECKING:
    from omegaconf import DictConfig

COMPARISON_FILE, EPISODES_FILE, PAGE_FILE = "comparison.csv", "episodes.csv", "report.html"
_TRAININGS = "trainings"


@dataclass
class ComparisonRunner(Runner):
    """Plays the same episodes with several policies, and says how far they differ and how sure that is.

    Each episode has its seeds, from which its environment and its agent draw, whichever policy plays it. Writes
    `comparison.csv` (means, interquartile means, differences from the first policy, probabilities of being better, all
    with 95 % intervals), `episodes.csv` (every episode) and `report.html`, and prints the table.

    :param policies: Configurations of policies by name. An entry may have `policy`, `wrappers` and `input_dir` instead,
        where a policy comes with wrappers of its own or with files in a directory, or `trainings`, a list of those:
        several trainings of the same policy, which are shown as one.
    :param n_episodes: Number of episodes.
    :param max_episode_steps: Steps after which an episode is cut off; 0: never.
    :param deterministic: Take the most probable actions.
    :param minimize: KPIs of which less is better.
    :param maximize: KPIs of which more is better, as of the return. Of the others neither counts as better.
    """

    policies: CollectionOfConfigType
    n_episodes: int = 50
    max_episode_steps: int = 0
    deterministic: bool = True
    minimize: Sequence[str] = ()
    maximize: Sequence[str] = ()
    comparison: Comparison | None = field(default=None, init=False)
    """The result, once the episodes have been played."""

    def __post_init__(self) -> None:
        self.n_episodes = whole_number("runner.n_episodes", self.n_episodes, at_least=2)
        self.max_episode_steps = whole_number("runner.max_episode_steps", self.max_episode_steps or 0, at_least=0)
        if not isinstance(self.policies, Mapping) or not self.policies:
            raise ConfigError(
                "policies: expected policies to compare, such as policies=[random,outputs/<name>/<time>], found "
                f"{self.policies!r}."
            )

    @override(Runner)
    def setup(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        self.maze_seeding = MazeSeeding.configured(cfg.get("seeding"))
        self._rewards: dict[str, list[str]] = {}
        self._seeds = self.maze_seeding.episode_seeds(self.n_episodes)

    @override(Runner)
    def run(self, **kwargs: Any) -> None:
        policies: Any = self.policies
        trainings = {name: trainings_of(entry) for name, entry in policies.items()}
        n_episodes = sum(map(len, trainings.values())) * self.n_episodes
        with Progress(n_episodes, "Comparison") as progress:
            played = [self._played(str(name), entries, progress) for name, entries in trainings.items()]
        self.comparison = self._compared(played)
        self._write(self.comparison)

    def _compared(self, played: Sequence[PlayedEpisodes]) -> Comparison:
        """What the episodes tell."""
        comparison = Comparison(played, [*map(str, self.minimize)], [RETURN, *map(str, self.maximize)])
        for key, names in (("minimize", comparison.minimized), ("maximize", comparison.maximized)):
            if unknown := [name for name in names if name not in comparison.measures]:
                raise ConfigError(
                    f"runner.{key}: the episodes have no {', '.join(unknown)}; there are "
                    f"{', '.join(comparison.measures)}."
                )
        return comparison

    def _write(self, comparison: Comparison) -> None:
        print(self._said(comparison), flush=True)
        write_files(self._files(comparison))

    def _said(self, comparison: Comparison) -> str:
        """What is printed."""
        return comparison.text()

    def _files(self, comparison: Comparison) -> dict[str, str]:
        """What is written, by the name of the file."""
        return {
            PAGE_FILE: comparison_page(comparison, datetime.now()).text(),
            COMPARISON_FILE: comparison.as_csv(),
            EPISODES_FILE: comparison.episodes_as_csv(self._seeds),
        }

    def _played(self, name: str, trainings: Sequence[Mapping[str, Any]], progress: Progress) -> PlayedEpisodes:
        episodes = [self._measures(name, training, progress) for training in trainings]
        common = [measure for measure in episodes[0][0] if all(measure in each for part in episodes for each in part)]
        measures = {
            measure: np.array([[each[measure] for each in part] for part in episodes], np.float64) for measure in common
        }
        return PlayedEpisodes(name, measures)

    def _measures(self, name: str, entry: Mapping[str, Any], progress: Progress) -> list[dict[str, float]]:
        """Return, length and KPIs of each episode."""
        maze_env, agent = env_and_policy(self._cfg, entry, wrappers_for(entry, self._cfg), self.max_episode_steps)
        self._rewards[name] = changes_of_rewards(maze_env)
        env: Any = LogStatsWrapper.wrap(maze_env)
        try:
            return played_measures(env, agent, self._seeds, self.deterministic, progress.update)
        finally:
            env.close()


def wrappers_for(entry: Mapping[str, Any], cfg: DictConfig) -> Any:
    """The wrappers that a policy acts in: its own, or those of the configuration."""
    return entry["wrappers"] if entry.get("wrappers") is not None else cfg.get("wrappers") or {}


def env_and_policy(
    cfg: DictConfig, entry: Mapping[str, Any], wrappers: Any, max_episode_steps: int
) -> tuple[Any, Policy]:
    """The configured environment in given wrappers, and the policy that an entry of :func:`trainings_of` describes."""
    input_dir = str(entry.get("input_dir") or "")
    return RolloutRunner.init_env_and_agent(cfg.env, wrappers, max_episode_steps, entry["policy"], input_dir)


def played_measures(
    env: Any, agent: Policy, seeds: EpisodeSeeds, deterministic: bool, episode_done: Callable[[], None]
) -> list[dict[str, float]]:
    """Plays episodes, and returns what :func:`measures_of` finds in each.

    :param env: An environment with statistics.
    :param agent: Acts.
    :param seeds: Of each episode.
    :param deterministic: Take the most probable actions.
    :param episode_done: Called after each episode.
    """
    found: list[dict[str, float]] = []

    def take_over() -> None:
        found.append(measures_of(env.get_stats(LogStatsLevel.EPISODE).last_stats))
        episode_done()

    RolloutRunner.run_interaction_loop(
        env, agent, len(seeds), episode_end_callback=take_over, episode_seeds=seeds, deterministic=deterministic
    )
    return found


def write_files(files: Mapping[str, str]) -> None:
    """Writes texts into the working directory, and says where they are.

    :param files: By name.
    """
    for name, text in files.items():
        write_whole(Path(name), text.encode(errors="replace"))
    print(f"Written: {', '.join(str(Path.cwd() / name) for name in files)}", flush=True)


def changes_of_rewards(env: Any) -> list[str]:
    """What wrappers do to rewards of an environment, innermost first: returns are comparable where it is the same."""
    found: list[str] = []
    while issubclass(type(env), Wrapper):
        if issubclass(type(env), RewardWrapper):
            settings = {name: value for name, value in vars(env).items() if isinstance(value, (int, float, str))}
            shown = ", ".join(f"{name}={value!r}" for name, value in settings.items() if not name.startswith("_"))
            found.insert(0, f"{type(env).__name__}({shown})")
        env = env.env
    return found


def measures_of(stats: LogStats) -> dict[str, float]:
    """Return, length and KPIs of an episode."""
    measures: dict[str, float] = {}
    kpis: dict[str, float] = {}
    for key, value in stats.items():
        if key.event is BaseEnvEvents.reward and key.output_name in ("sum", "count"):
            measures[RETURN if key.output_name == "sum" else LENGTH] = float(value)
        elif key.event is BaseEnvEvents.kpi and key.group:
            kpis[str(key.group[0])] = float(value)
    return {**dict(sorted(measures.items())), **kpis}


def trainings_of(entry: Any) -> list[Mapping[str, Any]]:
    """The trainings of a policy, each with the keys `policy`, `wrappers` and `input_dir`."""
    if isinstance(entry, Mapping) and _TRAININGS in entry:
        return [training for each in entry[_TRAININGS] for training in trainings_of(each)]
    if isinstance(entry, Mapping) and "policy" in entry:
        return [entry]
    return [{"policy": entry}]
