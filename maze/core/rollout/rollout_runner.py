"""Rollouts: an agent acts in an environment for a number of episodes, nothing is learned. Check of an environment."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maze.core.agent.policy import Policy, acting_in, build_policy
from maze.core.annotations import override
from maze.core.env.context import ordered_seeds
from maze.core.env.faults import LONG_EPISODE, USER_CODE_ERRORS, Place, check_episode_ends, failure, failure_of_acting
from maze.core.env.maze_env import MazeEnv
from maze.core.env.space_values import check_in_space
from maze.core.env.structured_env import StructuredEnv
from maze.core.errors import CheckpointError, ConfigError, EnvironmentContractError, MazeError
from maze.core.rendering.renderer import draw_current_state
from maze.core.rollout.recording import open_window
from maze.core.rollout.solve import BestPlays, EpisodeSeeds, Search, acts_in_batches
from maze.core.utils.config_utils import EnvFactory, count_instances, flag, whole_number, with_files_of
from maze.core.utils.factory import CollectionOfConfigType, ConfigType, plain_container
from maze.core.utils.import_guard import ForeignModuleError, imports_guarded
from maze.core.utils.seeding import MazeSeeding
from maze.core.utils.stored_config import StoredRun
from maze.core.wrappers.observation_normalization.observation_normalization_wrapper import (
    ObservationNormalizationWrapper,
)
from maze.core.wrappers.return_normalization_reward_wrapper import freeze_statistics
from maze.core.wrappers.time_limit_wrapper import CallTimeLimitWrapper, TimeLimitWrapper, checked_time_limit
from maze.core.wrappers.wrapper_factory import WrapperFactory
from maze.planning.branches import simulation_of
from maze.runner import Runner
from maze.utils.check_env import check_env

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from maze.core.log_stats.log_stats import LogStats

_ACTING = "compute_action"


class RolloutRunner(Runner, ABC):
    """Run rollouts of any agent in any environment; where and how the episodes run is up to subclasses.

    Each episode has seeds of its own. Results depend on them only, not on the process an episode happens to run in.

    :param n_episodes: Number of episodes in total.
    :param max_episode_steps: Steps after which an episode is truncated; 0: never.
    :param record_trajectory: Store each episode's trajectory in `trajectory_data`.
    :param record_event_logs: Store all events in `event_logs`.
    :param deterministic: Return deterministic (greedy) actions instead of sampling.
    :param record_actions: Store each episode's seed and actions in `action_records`, to be replayed.
    :param env_timeout: Seconds that a step or a reset of the environment may take; `None`: any time.
    :param record_parquet: Store each episode as a table in `trajectory_parquet`.
    :param best_of: Play each episode that many times with other samples of the policy, and record a repetition of the
        best play, as is usual for constructed solutions such as schedules.
    :param clairvoyant: Allow `best_of` in stochastic environments, where it chooses with hindsight among plays with the
        same random numbers. The result is an upper bound, not the performance of the policy.
    :param starts: `first_action`: instead of samples, try every first action of an episode and continue greedily.
    """

    def __init__(
        self,
        n_episodes: int,
        max_episode_steps: int,
        record_trajectory: bool,
        record_event_logs: bool,
        deterministic: bool = False,
        record_actions: bool = False,
        env_timeout: float | None = None,
        record_parquet: bool = False,
        best_of: int = 1,
        clairvoyant: bool = False,
        starts: str | None = None,
    ) -> None:
        self.env_timeout = checked_time_limit("runner.env_timeout", env_timeout)
        self.n_episodes = whole_number("runner.n_episodes", n_episodes, at_least=1)
        self.max_episode_steps = whole_number("runner.max_episode_steps", max_episode_steps or 0, at_least=0)
        self.record_trajectory = flag("runner.record_trajectory", record_trajectory)
        self.record_event_logs = flag("runner.record_event_logs", record_event_logs)
        self.deterministic = flag("runner.deterministic", deterministic)
        self.record_actions = flag("runner.record_actions", record_actions)
        self.record_parquet = flag("runner.record_parquet", record_parquet)
        self.search = Search(best_of, clairvoyant, starts)
        if self.search.best_of > 1 and deterministic:
            raise ConfigError(
                f"runner.best_of={best_of} chooses among samples of the policy, but runner.deterministic=true takes "
                "its greedy actions. Leave one of them out."
            )
        self.input_dir = ""
        self.maze_seeding = MazeSeeding(None, None, False)
        self.stats: LogStats | None = None
        """Statistics over all episodes, once they have run."""
        self.n_cut_off = 0
        """Number of episodes that were truncated after `max_episode_steps`."""
        self._cfg: Any = None

    @override(Runner)
    def setup(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        self.input_dir = cfg.get("input_dir") or ""
        if cfg.get("seeding") is not None:
            self.maze_seeding = MazeSeeding.configured(cfg.seeding)

    @override(Runner)
    def run(self, **kwargs: Any) -> None:
        self.run_with(
            env=plain_container(self._cfg.env, "env"),
            wrappers=plain_container(self._cfg.get("wrappers") or {}, "wrappers"),
            agent=plain_container(self._cfg.policy, "policy"),
        )

    @abstractmethod
    def run_with(self, env: ConfigType, wrappers: CollectionOfConfigType, agent: ConfigType) -> None:
        """Run the episodes, write the requested records, and print the statistics.

        :param env: Environment, or configuration of one.
        :param wrappers: Wrappers to put around it, innermost first.
        :param agent: Policy, or configuration of one.
        """

    @staticmethod
    def init_env_and_agent(
        env_config: ConfigType,
        wrappers_config: CollectionOfConfigType,
        max_episode_steps: int,
        agent_config: ConfigType,
        input_dir: str = "",
        env_instance_seed: int | None = None,
        agent_instance_seed: int | None = None,
        env_timeout: float | None = None,
        where: str = "policy",
    ) -> tuple[MazeEnv[Any], Policy]:
        """Build environment and agent.

        :param env_config: Environment, or its configuration.
        :param wrappers_config: Wrappers to put around it, innermost first.
        :param max_episode_steps: Environment steps after which episodes are truncated; 0: never.
        :param agent_config: Policy, or its configuration.
        :param input_dir: Directory of a training run; relative file names in the configurations refer to it, and its
            normalization statistics are used.
        :param env_instance_seed: Seed of the environment; `None`: it is not seeded.
        :param agent_instance_seed: Seed of the policy; `None`: it is not seeded.
        :param env_timeout: Seconds that a step or a reset may take; `None`: any time.
        :param where: Place of the agent in the configuration, for messages.
        """
        if input_dir:
            env_config = with_files_of(input_dir, env_config, "env")
            wrappers_config = with_files_of(input_dir, wrappers_config, "wrappers")
            agent_config = with_files_of(input_dir, agent_config, where)
        try:
            env: Any = env_config if isinstance(env_config, MazeEnv) else EnvFactory(env_config)()
            env = WrapperFactory.wrap_from_config(env, wrappers_config or {})
            freeze_statistics(env)
            if input_dir:
                _use_statistics_of_run(env, input_dir)
            agent = build_policy(agent_config, env, where)
            trained_for: Any = getattr(agent, "spaces", agent)
            if hasattr(trained_for, "require_same"):
                trained_for.require_same(env, where)
        except CheckpointError as error:
            if not input_dir or isinstance(error, ForeignModuleError):
                raise
            raise CheckpointError(f"input_dir={input_dir}: {error}") from error
        if max_episode_steps:
            env = TimeLimitWrapper.wrap(env, max_episode_steps=max_episode_steps)
        if env_timeout is not None:
            env = CallTimeLimitWrapper.wrap(env, seconds=env_timeout)
        if env_instance_seed is not None:
            env.seed(env_instance_seed)
        if agent_instance_seed is not None:
            agent.seed(agent_instance_seed)
        agent.bind(env)
        return env, agent

    @staticmethod
    def init_stored_env_and_agent(
        run_dir: str | Path,
        trusted_packages: Sequence[str] = (),
        device: str = "cpu",
        state_dict_file: str = "state_dict.pt",
    ) -> tuple[MazeEnv[Any], Policy]:
        """Build the environment, with wrappers and their statistics, and the policy of a training run.

        :param run_dir: The run's directory.
        :param trusted_packages: Packages whose classes and functions the stored configuration may name.
        :param device: Device of the networks.
        :param state_dict_file: File of the weights.
        :raises CheckpointError: The directory is not a training run, or its files cannot be read.
        """
        with imports_guarded():
            run = StoredRun(run_dir, trusted_packages).deployed(device, state_dict_file)
            return RolloutRunner.init_env_and_agent(run.env, run.wrappers or {}, 0, run.policy, str(run_dir))

    @staticmethod
    def run_interaction_loop(
        env: StructuredEnv,
        agent: Policy,
        n_episodes: int,
        render: bool = False,
        episode_end_callback: Callable[[], None] | None = None,
        episode_seeds: EpisodeSeeds | None = None,
        deterministic: bool = False,
        returns: list[float] | None = None,
    ) -> None:
        """Run a number of episodes.

        An episode's statistics, event log and trajectory are complete when the environment is reset after it.

        :param env: The environment with its wrappers.
        :param agent: The policy.
        :param n_episodes: Number of episodes.
        :param render: Show each step with the environment's renderer.
        :param episode_end_callback: Called after each episode, when its records are complete.
        :param episode_seeds: Seeds of each episode; without them, the generators of the first continue.
        :param deterministic: Return deterministic (greedy) actions.
        :param returns: List to which the return of each episode is appended.
        """
        if render:
            open_window(env)
        act = acting_in(env, agent, deterministic)
        name, call, observation = "environment", "seed", {}
        try:
            for episode in range(n_episodes):
                name, call = f"environment in episode {episode}", "seed"
                if episode_seeds is not None:
                    name = f"environment in the episode seeded with {episode_seeds[episode][0]}"
                    env.seed(episode_seeds[episode][0])
                    agent.seed(episode_seeds[episode][1])
                call = "reset"
                observation = env.reset()
                actor_id = env.actor_id  # wrappers look it up in the wrapped environment
                if episode and episode_end_callback is not None:
                    call = ""
                    episode_end_callback()
                done, n_steps, total = False, 0, 0.0
                while not done:
                    if render:
                        call = "render"
                        draw_current_state(env)
                    actor = actor_id()
                    call = _ACTING
                    action = act(observation, actor)
                    call = "step"
                    observation, reward, done, _ = env.step(action)
                    n_steps += 1
                    total += reward
                    if n_steps % LONG_EPISODE == 0:
                        check_episode_ends(n_steps, name)
                if returns is not None:
                    returns.append(total)
                if render:
                    call = "render"
                    draw_current_state(env)
            call = "reset"
            env.reset()
        except USER_CODE_ERRORS as error:
            named = _failure(error, call, env, name, observation)
            if named is error:
                raise
            raise named from error
        if episode_end_callback is not None:
            episode_end_callback()

    @staticmethod
    def best_plays(
        env: StructuredEnv, agent: Policy, episode_seeds: EpisodeSeeds, search: Search
    ) -> tuple[Policy, EpisodeSeeds]:
        """Return a policy and seeds that repeat the best play of a search in each episode.

        :param env: An environment without recorders.
        :param agent: The policy; where `search` tries nothing, it is returned itself.
        :param episode_seeds: Seeds of each episode; that of the agent is the first one tried.
        :param search: Plays that are tried.
        :raises ConfigError: The environment is stochastic, and `search.clairvoyant` is not set; or environment or
            policy do not allow first actions to be tried.
        """
        if not search.is_active:
            return agent, episode_seeds
        search.check_chance(env)
        env.reset()  # all steps are left
        batched = simulation_of(env)
        if batched is not None and acts_in_batches(agent):
            plays = BestPlays(batched, agent, episode_seeds, search)
            return plays, [(env_seed, number) for number, (env_seed, _) in enumerate(episode_seeds)]
        if search.starts:
            raise ConfigError(
                "runner.starts: expected an environment with a vectorised simulation (a BatchedMazeEnv) without "
                f"wrappers, and a policy that acts on observations alone; found {type(env).__name__} and "
                f"{type(agent).__name__}. Use runner.best_of, which has none of these requirements."
            )
        best = []
        for env_seed, agent_seed in episode_seeds:
            others = np.random.SeedSequence(agent_seed).generate_state(search.best_of - 1)
            tried = [(env_seed, seed) for seed in (agent_seed, *others.tolist())]
            returns: list[float] = []
            with search.trying():
                RolloutRunner.run_interaction_loop(env, agent, search.best_of, episode_seeds=tried, returns=returns)
            best.append(tried[int(np.argmax(returns))])
        return agent, best

    def _announce(self, agent: Any) -> None:
        """Print whether a policy of networks samples its actions; it is unknown of other policies."""
        if hasattr(agent, "networks") or (isinstance(agent, Mapping) and "state_dict_file" in agent):
            other = "false samples them" if self.deterministic else "true takes greedy ones"
            kind = "greedy actions" if self.deterministic else "sampled actions"
            print(f"Rolling out with {kind} of the policy; runner.deterministic={other}.", flush=True)

    def draw_episode_seeds(self, env: ConfigType = None) -> list[tuple[int, int]]:
        """Return the seeds of all episodes, in their order.

        :param env: The environment or its configuration; with an instance set, episode `i` plays instance `i`.
        """
        seeds = self.maze_seeding.episode_seeds(self.n_episodes)
        if self.input_dir and isinstance(env, Mapping):
            env = with_files_of(self.input_dir, env, "env")
        if not (n_instances := count_instances(env)):
            return seeds
        if self.n_episodes < n_instances:
            print(f"The first {self.n_episodes} of {n_instances} instances (runner.n_episodes).", flush=True)
        return ordered_seeds(seeds, n_instances)


@dataclass
class CheckRunner(Runner):
    """Check the configured environment with its wrappers and print the findings.

    :param n_steps: Sub-steps to take.
    :param masks: Action head of each mask, where sizes are ambiguous.
    """

    n_steps: int = 200
    masks: Mapping[str, str] | None = None

    @override(Runner)
    def setup(self, cfg: DictConfig) -> None:
        self.maze_seeding = MazeSeeding.configured(cfg.get("seeding"))
        self._env_factory = EnvFactory(cfg.env, cfg.get("wrappers") or {})

    @override(Runner)
    def run(self, **kwargs: Any) -> None:
        """Print the report; findings end the command with an error."""
        seed = self.maze_seeding.generate_env_instance_seed()
        report = check_env(self._env_factory, self.n_steps, seed, self.masks)
        if report.findings:
            raise EnvironmentContractError(str(report))
        print(report, flush=True)


def _failure(error: BaseException, call: str, env: Any, name: str, observation: Any) -> BaseException:
    """Return the error of a failed episode; errors that are not the environment's stay unchanged."""
    place = Place.of(env, name)
    if call not in ("", _ACTING):
        return failure(error, place, call)
    if not call:
        return error
    try:
        step_key = place.actor.step_key if place.actor is not None else ""
        check_in_space(observation, env.observation_space, type(env).__name__, step_key)
    except EnvironmentContractError as misfit:
        return failure(misfit, place, call)
    if not isinstance(error, MazeError):
        return error
    batch = {key: np.asarray(value)[np.newaxis] for key, value in observation.items()}
    named = failure_of_acting(error, batch, lambda _: place)
    if named is error and error.args == (str(error),):
        error.args = (f"{place}: {error}",)
    return named


def _use_statistics_of_run(env: Any, input_dir: str) -> None:
    """Read normalization statistics of a run that leaves the name of their file to the default of the wrapper.

    Warn of statistics without their wrapper.
    """
    if isinstance(env, ObservationNormalizationWrapper):
        dump = env.statistics_dump
        if dump is not None and dump.parent == Path.cwd() and env.names_to_estimate():
            file = Path(input_dir, dump.name)
            if file.is_file():
                env.load_statistics(file)
    elif Path(input_dir, "statistics.pkl").is_file():
        warnings.warn(
            f"input_dir: {input_dir} holds normalization statistics (statistics.pkl), but the environment normalizes "
            "no observations. Use the wrappers that the policy was trained with, for instance wrappers=vector_obs.",
            stacklevel=2,
        )
