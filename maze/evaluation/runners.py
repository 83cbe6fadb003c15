"""Runners of `maze-run` that evaluate policies: comparison, decision inspector, replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from maze.console.runs import Progress
from maze.core.agent.policy import Policy
from maze.core.annotations import override
from maze.core.env.context import GRID, ordered_seeds
from maze.core.env.faults import USER_CODE_ERRORS, Place, fail
from maze.core.env.maze_env import MazeEnv
from maze.core.env.reward import RewardAggregatorInterface
from maze.core.errors import ConfigError
from maze.core.log_events.kpi_calculator import KpiCalculator
from maze.core.log_stats.log_stats import LogStatsLevel
from maze.core.rendering.trajectory_page import check_video_file, write_trajectory_page, write_video
from maze.core.rollout.recording import TRAJECTORY_DIR
from maze.core.rollout.rollout_runner import RolloutRunner
from maze.core.rollout.solve import EpisodeSeeds
from maze.core.trajectory_recording.datasets.in_memory_dataset import InMemoryDataset
from maze.core.trajectory_recording.records.trajectory_record import StateTrajectoryRecord, load_trajectories
from maze.core.trajectory_recording.writers.trajectory_writer_file import TrajectoryWriterFile
from maze.core.utils.config_utils import EnvFactory, count_instances, flag, number, whole_number
from maze.core.utils.factory import TARGET_KEY, CollectionOfConfigType, ConfigType, Factory
from maze.core.utils.files import write_whole
from maze.core.utils.seeding import MazeSeeding
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.trajectory_recording_wrapper import with_frames
from maze.core.wrappers.wrapper import RewardWrapper
from maze.evaluation.comparison import (
    RETURN,
    Comparison,
    ContextComparison,
    PlayedEpisodes,
    TailComparison,
    comparison_page,
    marked,
    measures_of,
    texts_of,
)
from maze.evaluation.inspection import inspected_episode
from maze.evaluation.replay import reward_replay, what_if
from maze.planning.branches import stack_of
from maze.report.page import Page
from maze.runner import Runner

COMPARISON_FILE, EPISODES_FILE, PAGE_FILE = "comparison.csv", "episodes.csv", "report.html"
CONTEXTS_FILE, TAILS_FILE = "contexts.csv", "tails.csv"
EPISODE_FILE, WHAT_IF_FILE = "episode.html", "what_if.html"
# Key of an entry of `policies` that lists several runs.
_RUNS = "runs"
# Rank of the chosen episode, the lowest return first, as a share of the last rank.
_CHOICES = {"best": 1.0, "worst": 0.0, "median": 0.5}
ANY_POLICY = {"_target_": "maze.core.agent.random_policy.RandomPolicy"}
"""Policy of an evaluation that only needs the environment."""


@dataclass(kw_only=True)
class EvaluationRunner(Runner):
    """Base of runners that play episodes with configured policies.

    :param max_episode_steps: Steps after which an episode is truncated; 0: never.
    :param deterministic: Take deterministic actions instead of sampling.
    """

    max_episode_steps: int = 0
    deterministic: bool = True

    def __post_init__(self) -> None:
        self.max_episode_steps = whole_number("runner.max_episode_steps", self.max_episode_steps or 0, at_least=0)
        self.deterministic = flag("runner.deterministic", self.deterministic)

    @override(Runner)
    def setup(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        self.maze_seeding = MazeSeeding.configured(cfg.get("seeding"))

    def built(self, entry: Mapping[str, Any], wrappers: Any = None, name: str = "policy") -> tuple[Any, Policy]:
        """Build the environment and the policy of an entry of :func:`runs_of`.

        :param entry: The entry.
        :param wrappers: Wrappers of the environment; `None`: those of the entry, by default of the configuration.
        :param name: Name of the policy, for messages.
        """
        wrappers = self.wrappers_of(entry) if wrappers is None else wrappers
        input_dir = str(entry.get("input_dir") or "")
        return RolloutRunner.init_env_and_agent(
            self._cfg.env, wrappers, self.max_episode_steps, entry["policy"], input_dir, where=name
        )

    def opened(self, entry: Mapping[str, Any], stack: ExitStack, wrappers: Any = None) -> tuple[Any, Policy]:
        """Build the environment and the policy of an entry as :meth:`built` does.

        :param entry: The entry.
        :param stack: Closes the environment at its end.
        :param wrappers: See :meth:`built`.
        """
        env, policy = self.built(entry, wrappers)
        stack.callback(env.close)
        return env, policy

    @cached_property
    def _n_instances(self) -> int:
        """Number of instances of the environment; 0: there is no set."""
        return count_instances(self._cfg.get("env"))

    @property
    def _is_grid(self) -> bool:
        """Whether the instances are all contexts that there are."""
        env = self._cfg.get("env")
        config = env.env if isinstance(env, EnvFactory) else env
        return isinstance(config, Mapping) and config.get("instances") == GRID

    def episode_seeds(self, n_episodes: int) -> list[tuple[int, int]]:
        """Return the seeds of environment and agent of each episode; further calls return other seeds.

        With an instance set, episode `i` plays instance `i mod n_instances`.

        :param n_episodes: Number of episodes.
        :raises ConfigError: Some instances would be played more often than others.
        """
        return ordered_seeds(self.maze_seeding.episode_seeds(n_episodes), self._n_instances)

    def wrappers_of(self, entry: Mapping[str, Any]) -> Any:
        """Return the wrappers that a policy acts in: its own, by default those of the configuration."""
        return entry["wrappers"] if entry.get("wrappers") is not None else self._cfg.get("wrappers") or {}


@dataclass
class ComparisonRunner(EvaluationRunner):
    """Play the same episodes with several policies and report the differences with confidence intervals.

    The environment and the agent of each episode are seeded independently of the policy. Writes `comparison.csv`
    (means, interquartile means, differences from the first policy, probabilities of improvement, all with 95 %
    intervals), `episodes.csv` (every episode) and `report.html`, and prints the table. If episodes have contexts
    (`env.context`), `contexts.csv` has the estimates of each context, and the report heat maps of the differences.
    With `risk`, `tails.csv`, report and console have the quantiles and CVaR of the measures that have a goal.

    :param policies: Configurations of policies by name. Instead, an entry may have `policy`, `wrappers` and
        `input_dir`, if the policy has its own wrappers or files in a directory, or `runs`, a list of such entries:
        several runs that count as one policy.
    :param n_episodes: Number of episodes.
    :param minimize: KPIs for which less is better; one name, or several.
    :param maximize: KPIs for which more is better, as for the return. Other KPIs have no goal.
    :param risk: Share of the episodes that are the worst, such as 0.1, or a list of shares; `None`: tails are left out.
    """

    policies: CollectionOfConfigType
    n_episodes: int = 50
    minimize: Sequence[str] = ()
    maximize: Sequence[str] = ()
    risk: float | Sequence[float] | None = None
    comparison: Comparison = field(init=False, repr=False, compare=False)
    """The result of :meth:`run`; available after it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.n_episodes = whole_number("runner.n_episodes", self.n_episodes, at_least=2)
        require_policies(self.policies)
        self.minimize, self.maximize = goals_of(self.minimize, self.maximize)
        risk: Any = [] if self.risk is None else self.risk
        given = [*risk] if isinstance(risk, Sequence) else [risk]
        self._levels = [float(level) for level in given if isinstance(level, float) and 0.0 < level < 1.0]
        if len(self._levels) < len(given):
            raise ConfigError(f"runner.risk: expected shares of the episodes such as 0.1, found {self.risk!r}.")

    @override(EvaluationRunner)
    def setup(self, cfg: DictConfig) -> None:
        super().setup(cfg)
        self._rewards: dict[str, list[str]] = {}
        self._seeds = self.episode_seeds(self.n_episodes)
        self._repeats = 1 if self._is_grid or not self._n_instances else max(1, self.n_episodes // self._n_instances)
        if self._repeats > 1 and self._levels:
            raise ConfigError(
                f"runner.risk: the episodes of an instance are not independent. Play each of the {self._n_instances} "
                f"instances once (runner.n_episodes={self._n_instances})."
            )

    @override(Runner)
    def run(self, **kwargs: Any) -> None:
        policies: Any = self.policies
        runs = {str(name): runs_of(entry) for name, entry in policies.items()}
        # A wrong argument ends the command before the first policy plays. Environments are opened one at a time, since
        # simulators may be large, or exist once.
        for name, entry in ((name, each) for name, entries in runs.items() for each in entries):
            env, policy = self.built(entry, name=name)
            env.close()
            self._rewards[marked(name, policy)] = reward_wrappers(env)
        self._check_rewards()
        with Progress(sum(map(len, runs.values())) * self.n_episodes, "Comparison") as progress:
            played = [self._played(name, entries, progress) for name, entries in runs.items()]
        self._episodes = Comparison(played)
        if self._repeats > 1:
            print(f"The {self._repeats} episodes of an instance count as one: their mean.", flush=True)
            played = [each.by_instance(self._n_instances) for each in played]
        self.comparison = self._compared(played)
        print(self._text(self.comparison), flush=True)
        write_files(self._files(self.comparison))

    def _check_rewards(self) -> None:  # a comparison reports wrappers that differ
        """Raise a `ConfigError` if returns are needed and cannot be compared."""

    def _compared(self, played: Sequence[PlayedEpisodes]) -> Comparison:
        """Compare the policies."""
        return Comparison(played, self.minimize, [RETURN, *self.maximize])

    def _require_goals(self, known: Sequence[str]) -> None:
        """Raise a `ConfigError` if an episode lacks a measure that has a goal.

        :param known: The measures of the episode.
        """
        for key, names in (("minimize", self.minimize), ("maximize", self.maximize)):
            if unknown := [name for name in names if name not in known]:
                raise ConfigError(
                    f"runner.{key}: the episodes have no {', '.join(unknown)}; there are {', '.join(known)}."
                )

    def _text(self, comparison: Comparison) -> str:
        """Return the text for the console."""
        parts = [comparison.text(), *([TailComparison(comparison, self._levels).text()] if self._levels else [])]
        rewards = {name: ", ".join(found) or "none" for name, found in self._rewards.items()}
        if len({*rewards.values()}) > 1:
            parts.append(
                f"The returns cannot be compared, because reward wrappers differ: {rewards}. Set those of all policies "
                "(wrappers=<option>), or compare KPIs."
            )
        return "\n\n".join(parts)

    def _files(self, comparison: Comparison) -> dict[str, str]:
        """Return the contents of the files by name."""
        env = self._cfg.get("env")  # an object where Python code passes one; texts are then shown as their index
        by_context = ContextComparison(comparison, texts_of(env.get("context") if isinstance(env, Mapping) else None))
        tails = TailComparison(comparison, self._levels)
        sections = [each.section() for each in (tails, by_context) if each]
        return {
            PAGE_FILE: self._completed(comparison_page(comparison, datetime.now(), sections)).text(),
            COMPARISON_FILE: comparison.as_csv(),
            EPISODES_FILE: self._episodes.episodes_as_csv(self._seeds),
            **({CONTEXTS_FILE: by_context.as_csv()} if by_context else {}),
            **({TAILS_FILE: tails.as_csv()} if tails else {}),
        }

    def _completed(self, page: Page) -> Page:
        """Add further content to the report."""
        return page

    def _played(self, name: str, runs: Sequence[Mapping[str, Any]], progress: Progress) -> PlayedEpisodes:
        episodes: list[list[dict[str, float]]] = []
        shown = name

        def episode_done(measures: Mapping[str, float]) -> None:
            # A misspelt measure ends the command after its first episode, not after hours.
            self._require_goals(Comparison([PlayedEpisodes.of(shown, [[measures]])]).measures)
            progress.update()

        for run in runs:
            env, policy = self.built(run)
            shown = marked(name, policy)
            episodes.append(played_measures(env, policy, self._seeds, self.deterministic, episode_done))
        return PlayedEpisodes.of(shown, episodes)


@dataclass
class InspectionRunner(EvaluationRunner):
    """Play an episode and write an HTML page with every decision in it.

    :param policies: As for :class:`ComparisonRunner`. The first policy acts. The others compute actions for the same
        observations, with the wrappers of the first policy.
    :param n_episodes: Number of episodes to choose from.
    :param choose: The episode to show, by its return: `best`, `worst` or `median`.
    :param video: File for a video of the episode, `.mp4` or `.gif`; `None`: none.
    :param frames_per_second: Steps per second of the video.
    :param gamma: Discount factor of temporal-difference errors; `None`: that of the run, by default 0.99.
    :param every_k_states: Draw only every k-th state of the episode.
    """

    policies: CollectionOfConfigType
    n_episodes: int = 1
    choose: str = "median"
    video: str | None = None
    frames_per_second: int = 30
    gamma: float | None = None
    every_k_states: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("n_episodes", "frames_per_second", "every_k_states"):
            whole_number(f"runner.{name}", getattr(self, name), at_least=1)
        require_policies(self.policies)
        if self.gamma is not None:
            number("runner.gamma", self.gamma, 0.0, 1.0)
        if self.choose not in _CHOICES:
            raise ConfigError(f"runner.choose: expected {', '.join(_CHOICES)}, found {self.choose!r}.")
        if self.video is not None:
            check_video_file(Path(self.video))

    @override(Runner)
    def run(self, **kwargs: Any) -> None:
        from maze.core.agent.serialized_torch_policy import trained_actor_critic

        policies: Any = self.policies
        entries = {str(name): run_of(f"policies.{name}", entry) for name, entry in policies.items()}
        name, acting = next(iter(entries.items()))
        wrappers = self.wrappers_of(acting)
        gamma = float(self.gamma if self.gamma is not None else acting.get("gamma") or 0.99)
        input_dir = acting.get("input_dir")
        with ExitStack() as stack:
            env, policy = self.opened(acting, stack, wrappers)
            others = {other: self.opened(entry, stack, wrappers)[1] for other, entry in list(entries.items())[1:]}
            env_seed, agent_seed = self._chosen_seeds(acting)
            critic = trained_actor_critic(acting["policy"], policy, input_dir) if input_dir else None
            try:
                env = with_frames(env)
                env.seed(env_seed)
                for agent in (policy, *others.values()):
                    agent.seed(agent_seed)
                episode = inspected_episode(env, policy, others, critic, gamma, self.deterministic)
            except USER_CODE_ERRORS as error:
                fail(error, Place.of(env, f"environment in the episode seeded with {env_seed}"), "reset or step")
        page = write_trajectory_page(
            episode.record,
            EPISODE_FILE,
            title=f"{marked(name, policy)}, seed {env_seed}",
            decisions=episode.decisions,
            every_k_states=self.every_k_states,
        )
        print(f"The episode is in {page.absolute()}; open it in a browser.", flush=True)
        if self.video is not None:
            video = write_video(episode.record, Path(self.video), self.frames_per_second)
            print(f"The video is in {video.absolute()}.", flush=True)

    def _chosen_seeds(self, acting: Mapping[str, Any]) -> tuple[int, int]:
        """Return the seeds of the environment and of the agent in the episode that is shown."""
        seeds = self.episode_seeds(self.n_episodes)
        if len(seeds) == 1:
            return seeds[0]
        env, policy = self.built(acting)
        with Progress(len(seeds), "Episodes to choose from") as progress:
            measures = played_measures(env, policy, seeds, self.deterministic, lambda _: progress.update())
        ranked = sorted(range(len(seeds)), key=lambda episode: measures[episode][RETURN])
        chosen = ranked[int(_CHOICES[self.choose] * (len(ranked) - 1))]
        print(f"The {self.choose} of {len(seeds)} episodes has a return of {measures[chosen][RETURN]:.6g}.", flush=True)
        return seeds[chosen]


@dataclass
class ReplayRunner(EvaluationRunner):
    """Replay recorded episodes, with other rewards or KPIs, or with another decision.

    :param trajectory_data: A trajectory file, or a directory of such files.
    :param reward_aggregator: Recomputes the returns from the recorded events; `None`: they stay as recorded.
    :param kpi_calculator: Recomputes the KPIs; `None`: that of the environment.
    :param what_if: `step`, `substep`, `action`, `policy`: see `maze.evaluation.replay.what_if`.
    :param allow: Further types that the files may hold, by full name or pattern.
    :param input_dir: Directory of the files of the wrappers and of the recorded policy.
    :param n_recorded: Number of episodes of the recorded rollout, whose seeds are derived from `seeding`.
    :param every_k_states: Draw only every k-th state of what-if pages.
    """

    trajectory_data: str
    reward_aggregator: ConfigType = None
    kpi_calculator: ConfigType = None
    what_if: ConfigType = None
    allow: Any = ()
    input_dir: str = ""
    n_recorded: int = 1
    every_k_states: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("runner.every_k_states", self.every_k_states, at_least=1)
        changes: Any = self.what_if or {}
        self._change: dict[str, Any] = dict(changes)
        if self._change.get("step") is None and self.reward_aggregator is None and self.kpi_calculator is None:
            raise ConfigError(
                "Nothing to replay: set reward_aggregator, kpi_calculator, or what_if.step with what_if.action or "
                "what_if.policy."
            )

    @override(Runner)
    def run(self, **kwargs: Any) -> None:
        entry = {"policy": ANY_POLICY, "input_dir": self.input_dir}
        with ExitStack() as stack:
            env = self.opened(entry, stack)[0] if self._cfg.get("env") else None
            episodes = self._episodes(env)
            if self.reward_aggregator is not None or self.kpi_calculator is not None:
                self._replay_rewards(episodes, env)
            if self._change.get("step") is not None:
                self._what_if(episodes, env)

    def _episodes(self, env: MazeEnv[Any] | None) -> list[StateTrajectoryRecord]:
        episodes: list[StateTrajectoryRecord] = []
        for file in InMemoryDataset.list_trajectory_files(self.trajectory_data):
            for found in load_trajectories(file, False, tuple(self.allow or ()), (), "allow=['<type>']", env):
                loaded: Any = found
                if not isinstance(loaded, StateTrajectoryRecord) or not loaded.step_records:
                    raise ConfigError(f"{file}: expected episodes of states, found a {type(loaded).__name__}.")
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
        ids = [(str(episode.id),) for episode in episodes]
        write_files(
            {
                PAGE_FILE: replace(page, sections=sections).text(),
                COMPARISON_FILE: comparison.as_csv(),
                EPISODES_FILE: comparison.episodes_as_csv(ids, ("episode_id",)),
            }
        )

    def _what_if(self, episodes: list[StateTrajectoryRecord], env: Any) -> None:
        if env is None:
            raise ConfigError(
                f"what_if: there is no configuration of a run beside {self.trajectory_data}; set the environment of "
                f"the recording, env=<option>, and its wrappers."
            )
        if len(episodes) != 1:
            raise ConfigError(
                f"what_if: {self.trajectory_data} holds {len(episodes)} episodes; name the file of one of them, "
                f"trajectory_data=<file>."
            )
        (episode,) = episodes
        policy = self._change.get("policy")
        with ExitStack() as stack:
            compared = what_if(
                with_frames(env),
                episode,
                self._change["step"],
                self._change.get("action"),
                None if policy is None else self.opened(run_of("what_if.policy", policy), stack)[1],
                self._change.get("substep") or 0,
                self._agent_seed(episode),
                self.deterministic,
            )
        print(compared.text(), flush=True)
        title = f"What if? Episode {episode.id}, step {compared.step}"
        page = compared.write_page(WHAT_IF_FILE, title, self.every_k_states)
        TrajectoryWriterFile(TRAJECTORY_DIR).write(compared.other)
        print(f"Both futures are in {page.absolute()}; open it in a browser.", flush=True)

    def _agent_seed(self, episode: StateTrajectoryRecord) -> int:
        """Return the seed that the agent had in the episode if it is known, otherwise that of a first episode."""
        seeds = self.episode_seeds(self.n_recorded)
        own = None if episode.action_record is None else episode.action_record.seed
        return dict(seeds).get(own, seeds[0][1]) if own is not None else seeds[0][1]


def names_of(key: str, given: str | Sequence[str] | None) -> list[str]:
    """Return names, given as one name or several; `None`: none.

    :param key: Their key in the configuration.
    :param given: The names.
    :raises ConfigError: They are not names.
    """
    if not isinstance(given, str | Sequence | None):
        raise ConfigError(f"{key}: expected a name, or a list of names, found {given!r}.")
    return [given] if isinstance(given, str) else [*map(str, given or ())]


def goals_of(minimize: str | Sequence[str] | None, maximize: str | Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Return the names of the minimised and of the maximised measures.

    :param minimize: One name, or several; `None`: none.
    :param maximize: The same.
    :raises ConfigError: They are not names, or a measure is among both.
    """
    less, more = names_of("runner.minimize", minimize), names_of("runner.maximize", maximize)
    if both := sorted({*less} & {*more}):
        raise ConfigError(f"runner.minimize and runner.maximize both name {', '.join(both)}. Remove it from one.")
    return less, more


def require_policies(policies: Any) -> None:
    """Check that there are policies by name.

    :param policies: A mapping from names to policies or entries of :func:`runs_of`.
    :raises ConfigError: It is no mapping, or empty.
    """
    if not isinstance(policies, Mapping) or not policies:
        raise ConfigError(
            f"policies: expected policies by name, such as policies=[random,outputs/<name>/<time>], found {policies!r}."
        )


def played_measures(
    env: Any,
    policy: Policy,
    seeds: EpisodeSeeds,
    deterministic: bool,
    episode_done: Callable[[dict[str, float]], None],
) -> list[dict[str, float]]:
    """Play episodes, close the environment, and return the measures of each episode (:func:`measures_of`).

    :param env: The environment.
    :param policy: The policy that acts.
    :param seeds: Seeds of each episode.
    :param deterministic: Take deterministic actions instead of sampling.
    :param episode_done: Takes the measures of each episode when it ends.
    """
    env, found = LogStatsWrapper.wrap(env), list[dict[str, float]]()

    def add_measures() -> None:
        found.append(measures_of(env.get_stats(LogStatsLevel.EPISODE).last_stats))
        episode_done(found[-1])

    try:
        RolloutRunner.run_interaction_loop(
            env, policy, len(seeds), episode_end_callback=add_measures, episode_seeds=seeds, deterministic=deterministic
        )
    finally:
        env.close()
    return found


def write_files(files: Mapping[str, str]) -> None:
    """Write texts by file name into the working directory and print their paths."""
    for name, text in files.items():
        write_whole(Path(name), text.encode(errors="replace"))
    print(f"Written: {', '.join(str(Path.cwd() / name) for name in files)}", flush=True)


def reward_wrappers(env: Any) -> list[str]:
    """Describe the reward wrappers of an environment, innermost first; returns are comparable if they are equal."""
    found: list[str] = []
    for layer in reversed(stack_of(env)):
        if issubclass(type(layer), RewardWrapper):
            settings = {name: value for name, value in vars(layer).items() if isinstance(value, (int, float, str))}
            shown = ", ".join(f"{name}={value!r}" for name, value in settings.items() if not name.startswith("_"))
            found.append(f"{type(layer).__name__}({shown})")
    return found


def runs_of(entry: Any) -> list[Mapping[str, Any]]:
    """Return the runs of an entry of `policies`.

    :param entry: A policy or its configuration; a mapping with `policy` and, optionally, `wrappers` and `input_dir`; or
        a mapping with `runs`, a list of such entries.
    :return: Mappings with `policy` and, where the entry has them, `wrappers` and `input_dir`.
    """
    if isinstance(entry, Mapping) and TARGET_KEY not in entry:  # else these are arguments of a policy's class
        if _RUNS in entry:
            return [run for each in entry[_RUNS] for run in runs_of(each)]
        if "policy" in entry:
            return [entry]
    return [{"policy": entry}]


def run_of(key: str, entry: Any) -> Mapping[str, Any]:
    """Return the only run of an entry, see :func:`runs_of`.

    :param key: Key of the entry, for the message.
    :param entry: The entry.
    :raises ConfigError: There are several runs.
    """
    found, *others = runs_of(entry)
    if others:
        raise ConfigError(f"{key}: expected one run, found {1 + len(others)}; name the directory of one of them.")
    return found
