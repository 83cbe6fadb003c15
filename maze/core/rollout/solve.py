"""Episodes of vectorised simulations in batches: the best of many plays, and solutions of given instances."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from maze.core.agent.policy import Policy, build_policy
from maze.core.annotations import override
from maze.core.env.batched_core_env import BatchedCoreEnv
from maze.core.env.batched_maze_env import BatchedMazeEnv
from maze.core.env.context import InstanceSource
from maze.core.env.faults import LONG_EPISODE, check_episode_ends, in_simulation
from maze.core.env.space_values import zeros
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.rollout.batched_acting import acting_function, check_interrupt
from maze.core.utils.config_utils import EnvFactory, whole_number, with_files_of
from maze.core.utils.factory import TARGET_KEY, ConfigType
from maze.core.utils.import_guard import imports_guarded
from maze.core.utils.stored_config import StoredRun
from maze.planning.branches import simulation_of
from maze.planning.rollout_policy import candidate_actions
from maze.utils.check_env import has_chance

FIRST_ACTION = "first_action"
"""Every action of the first decision is tried, and continued greedily (Kwon et al. 2020, POMO, NeurIPS 33)."""
_MOST_STARTS = 4096
# Number of simulations that are stepped at once.
_MOST_ROWS = 1024

Action = Mapping[str, np.ndarray]
EpisodeSeeds = Sequence[tuple[int, int]]
"""One pair per episode: seed of the environment, seed of the agent."""


@dataclass(frozen=True)
class Search:
    """Plays that are tried before the best one is repeated and recorded.

    :param best_of: Number of sampled plays; 1: none is tried.
    :param clairvoyant: Allow it in stochastic environments.
    :param starts: `first_action`: every first action is tried instead, and continued greedily.
    :raises ConfigError: A value is out of its range.
    """

    best_of: int = 1
    clairvoyant: bool = False
    starts: str | None = None

    def __post_init__(self) -> None:
        whole_number("best_of", self.best_of, at_least=1)
        if self.starts not in (None, FIRST_ACTION):
            raise ConfigError(f"starts: expected {FIRST_ACTION} or null, found {self.starts!r}.")
        if self.starts and self.best_of > 1:
            raise ConfigError(f"starts={self.starts} continues greedily; found it with {self.best_of} sampled plays.")

    @property
    def is_active(self) -> bool:
        """Whether anything is tried."""
        return self.best_of > 1 or bool(self.starts)

    def trying(self) -> AbstractContextManager[None]:
        """Return a context whose errors state that a play was tried."""
        return in_simulation("one of the plays of an episode that are tried before the best one is repeated")

    def check_chance(self, env: Any) -> None:
        """Refuse to choose among plays with hindsight.

        :param env: The environment, which is seeded and reset, and in which random actions are taken. It passes if its
            future cannot be replaced.
        :raises ConfigError: The environment is stochastic, and `clairvoyant` is not set.
        """
        if self.clairvoyant or not self.is_active:
            return
        with suppress(NotImplementedError, EnvironmentContractError):  # its future cannot be replaced
            if has_chance(env):
                raise ConfigError(
                    f"{f'starts={self.starts}' if self.starts else f'best_of={self.best_of}'}: "
                    f"the environment is stochastic, so that the best of several plays of the "
                    "same seed is chosen with hindsight. Use policy=rollout to plan, or clairvoyant=true for the upper "
                    "bound."
                )


NO_SEARCH = Search()


@dataclass(frozen=True)
class Solution:
    """The best play of an instance, or of an episode.

    :param total_reward: Sum of its rewards.
    :param kpis: Its KPIs by name.
    :param state: Arrays of the state at the end of the episode by name.
    :param actions: One for each sub-step.
    :param all_returns: Sums of the rewards of all plays, `[n_plays]`.
    """

    total_reward: float
    kpis: Mapping[str, float]
    state: Mapping[str, np.ndarray]
    actions: Sequence[Action]
    all_returns: np.ndarray


def solve(
    run_or_policy: Policy | str | Path,
    env: BatchedMazeEnv | ConfigType | Callable[..., Any],
    instances: InstanceSource | Any = None,
    n_samples: int = 1,
    *,
    starts: str | None = None,
    seed: int = 0,
    clairvoyant: bool = False,
    trusted_packages: Sequence[str] = (),
) -> list[Solution]:
    """Play given instances in batches, and return the best play of each, in their order.

    :param run_or_policy: A policy, the directory of a training run, or the file of a bundle.
    :param env: An environment with a vectorised simulation (:class:`~maze.core.env.batched_maze_env.BatchedMazeEnv`),
        without wrappers; or a configuration, class or function that makes one for the argument `instances`.
    :param instances: An instance set, its arrays or its file, or what else `env` takes as `instances`; `None`: the
        instance set of `env`.
    :param n_samples: Plays of each instance; 1: one with greedy actions, more: with sampled ones.
    :param starts: `first_action`: each first action is tried and continued greedily, instead of samples.
    :param seed: Seed of the policy and the environment.
    :param clairvoyant: Allow several plays in stochastic environments: the best is then chosen with hindsight.
    :param trusted_packages: Packages whose classes the configuration of the run may name.
    :raises ConfigError: There are no instances, they do not fit, or environment or policy cannot act in batches.
    """
    search = Search(whole_number("n_samples", n_samples, at_least=1), clairvoyant, starts)
    built = _environment(env, instances)
    built.reset()  # all steps are left
    batched = simulation_of(built)
    if batched is None:
        raise ConfigError(
            f"solve: expected an environment with a vectorised simulation (a BatchedMazeEnv) without wrappers, found "
            f"{type(built).__name__}."
        )
    policy = _policy(run_or_policy, built, trusted_packages)

    def make(n_envs: int) -> BatchedCoreEnv:
        simulation = batched[0].batch(n_envs)
        if isinstance(env, BatchedMazeEnv):
            simulation.use_instances(instances)
        return simulation

    n_instances = make(1).n_instances
    if not n_instances:
        raise ConfigError("solve: there are no instances; pass an instance set as `instances`.")
    search.check_chance(built)
    player = BatchPlayer(make, policy, batched[1])
    policy.seed(seed)

    def begin(simulation: BatchedCoreEnv, rows: np.ndarray, numbers: np.ndarray) -> None:
        for row, number in zip(rows.tolist(), numbers.tolist(), strict=True):
            simulation.seed_row(row, seed + number)
        simulation.next_instance[rows] = numbers
        simulation.begin(rows)

    size = 1 if starts else max(1, _MOST_ROWS // n_samples)
    numbers = np.arange(n_instances)
    found: list[Solution] = []
    for first in range(0, n_instances, size):
        found += player.best(begin, numbers[first : first + size], n_samples, n_samples == 1, starts)
    return found


class BatchPlayer:
    """Play episodes side by side, several from each beginning.

    :param make: Makes the simulation for a number of environments.
    :param policy: The policy; evaluated for all at once where it has `compute_actions`.
    :param max_steps: Environment steps after which an episode is truncated; `None`: no limit.
    :raises ConfigError: The policy needs an environment or its state.
    """

    def __init__(self, make: Callable[[int], BatchedCoreEnv], policy: Policy, max_steps: int | None = None) -> None:
        if not acts_in_batches(policy):
            raise ConfigError(f"{type(policy).__name__} needs the environment or its state; batches have neither.")
        self._simulation, self._policy, self._max_steps = cache(make), policy, max_steps

    def best(
        self,
        begin: Callable[[BatchedCoreEnv, np.ndarray, np.ndarray], None],
        numbers: np.ndarray,
        n_samples: int,
        deterministic: bool,
        starts: str | None = None,
    ) -> list[Solution]:
        """Play some episodes several times, and return the best play of each.

        :param begin: Begins episodes in a simulation: its rows, and the number of the episode of each.
        :param numbers: Numbers of the episodes; with `starts` a single one.
        :param n_samples: Plays of each.
        :param deterministic: Take greedy actions instead of sampled ones.
        :param starts: See :func:`solve`.
        """
        first = None
        if starts:
            first = self._first_actions(begin, numbers)
            n_samples, deterministic = len(next(iter(first.values()))), True
        beginnings, tried = np.arange(len(numbers)), []
        for begun in range(0, n_samples, _MOST_ROWS):
            n_plays = min(_MOST_ROWS, n_samples - begun)
            simulation = self._simulation(len(numbers) * n_plays)
            simulation.substep = 0
            begin(simulation, beginnings * n_plays, numbers)
            if n_plays > 1:
                simulation.copy_rows(simulation, np.repeat(beginnings * n_plays, n_plays), slice(0, simulation.n_envs))
            part = first and {head: actions[begun : begun + n_plays] for head, actions in first.items()}
            tried.append(self._played(simulation, n_plays, deterministic, part))
        return [
            replace(
                max(plays, key=lambda play: play.total_reward),
                all_returns=np.concatenate([play.all_returns for play in plays]),
            )
            for plays in zip(*tried, strict=True)
        ]

    def _first_actions(
        self, begin: Callable[[BatchedCoreEnv, np.ndarray, np.ndarray], None], numbers: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return candidates of an episode's first decision, `[n_candidates, ...]` by head; the greedy one first."""
        simulation, row = self._simulation(1), np.zeros(1, np.int64)
        simulation.substep = 0
        begin(simulation, row, numbers)
        step_key, act = simulation.step_keys[0], self._policy.compute_action
        seen = zeros(simulation.observation_spaces, (1,), "observation")[step_key]
        simulation.observe(seen)
        observation, actor = {key: array[0] for key, array in seen.items()}, ActorID(step_key, 0)
        candidates = candidate_actions(
            act(observation, None, None, actor, deterministic=True), simulation.action_spaces[step_key], observation,
            _MOST_STARTS, np.random.default_rng(0), lambda: act(observation, None, None, actor, deterministic=False),
        )  # fmt: skip
        return {key: np.stack([np.asarray(each[key]) for each in candidates]) for key in candidates[0]}

    def _played(
        self, simulation: BatchedCoreEnv, n_samples: int, deterministic: bool, first: Action | None
    ) -> list[Solution]:
        """Play the episodes that have begun, and choose the best of each `n_samples` rows."""
        n_rows = simulation.n_envs
        batch = SimpleNamespace(  # what acting functions read of a vector environment
            n_envs=n_rows,
            terminated=simulation.no_rows,
            truncated=simulation.no_rows,
            autoreset_pending=None,
            get_env_time=lambda: simulation.elapsed,
            seeding_at=lambda env_index, ticks_ago: None,
        )
        act = acting_function(self._policy, batch, deterministic)
        observations = zeros(simulation.observation_spaces, (n_rows,), "observation")
        returns, n_decisions, is_over = np.zeros(n_rows), np.zeros(n_rows, np.int64), np.zeros(n_rows, np.bool_)
        states = {name: array.copy() for name, array in simulation.arrays().items()}
        kpis: dict[str, np.ndarray] = {}
        taken: list[dict[str, np.ndarray]] = []
        n_steps = 0
        while not is_over.all():
            step_key = simulation.step_keys[simulation.substep]
            actions = zeros({step_key: simulation.action_spaces[step_key]}, (n_rows,), "action")[step_key]
            if first is not None:
                for key, array in actions.items():
                    array[:] = first[key]
                first = None
            else:
                simulation.observe(observations[step_key])
                act(observations[step_key], ActorID(step_key, 0), actions, None, None)
            rewards, terminated, truncated = simulation.advance(actions)
            taken.append(actions)
            returns += np.where(is_over, 0.0, rewards)
            n_decisions += ~is_over
            n_steps += simulation.is_step_complete
            ends = terminated | truncated
            if simulation.is_step_complete and n_steps == self._max_steps:
                ends = np.ones(n_rows, np.bool_)
            batch.terminated = ends
            if ends.any():
                new = np.flatnonzero(ends & ~is_over)
                for name, array in simulation.arrays().items():
                    states[name][new] = array[new]
                for name, values in simulation.kpis(new).items():
                    kpis.setdefault(name, np.zeros(n_rows, values.dtype))[new] = values
                is_over |= ends
                running = np.flatnonzero(~is_over)
                if len(running):  # rows that have ended follow one that has not: ended episodes need not be stepped
                    ended = np.flatnonzero(ends)
                    simulation.copy_rows(simulation, np.full(len(ended), running[0]), ended)
            check_interrupt()
            if n_steps % LONG_EPISODE == 0:
                check_episode_ends(n_steps, "the batch")
        return [
            Solution(
                float(returns[row]),
                {name: values[row].item() for name, values in kpis.items()},
                {name: array[row] for name, array in states.items()},
                [{key: array[row] for key, array in each.items()} for each in taken[: n_decisions[row]]],
                returns[first : first + n_samples],
            )
            for first in range(0, n_rows, n_samples)
            for row in [first + int(returns[first : first + n_samples].argmax())]
        ]


class BestPlays(Policy):
    """Repeat in each episode the best of several plays, which are tried in a batch when the episode is seeded.

    :param env: Vectorised simulation of the environment, and its time limit.
    :param policy: The policy whose plays are tried.
    :param seeds: Seeds of environment and agent of each episode; this policy is seeded with its number instead.
    :param search: Plays that are tried.
    """

    def __init__(
        self, env: tuple[BatchedMazeEnv, int | None], policy: Policy, seeds: EpisodeSeeds, search: Search
    ) -> None:
        self._player = BatchPlayer(env[0].batch, policy, env[1])
        self._policy, self._seeds, self._search = policy, seeds, search
        self._actions: list[Action] = []

    @override(Policy)
    def seed(self, seed: int) -> None:
        env_seed, agent_seed = self._seeds[seed]

        def begin(simulation: BatchedCoreEnv, rows: np.ndarray, numbers: np.ndarray) -> None:
            for row in rows.tolist():
                simulation.seed_row(row, env_seed)
            simulation.begin(rows)

        self._policy.seed(agent_seed)
        number, search = np.zeros(1, np.int64), self._search
        with search.trying():
            (found,) = self._player.best(begin, number, search.best_of, False, search.starts)
        self._actions = list(reversed(found.actions))

    @override(Policy)
    def compute_action(
        self, observation: Any, maze_state: Any, env: Any, actor_id: ActorID | None = None, deterministic: bool = False
    ) -> dict[str, Any]:
        return dict(self._actions.pop())


def acts_in_batches(policy: Policy) -> bool:
    """Return whether a policy acts on observations alone."""
    is_recurrent = hasattr(policy, "compute_actions") and getattr(policy, "is_recurrent", False)
    return is_recurrent or not (policy.needs_state() or policy.needs_env())


def _environment(env: Any, instances: Any) -> Any:
    """Return the environment, made for the instances where it is not there yet."""
    if isinstance(env, BatchedMazeEnv):
        return copy.deepcopy(env)
    if isinstance(env, Mapping) or callable(env):
        given = {} if instances is None else {"instances": instances}
        env = {**(env if isinstance(env, Mapping) else {TARGET_KEY: env}), **given}
    return EnvFactory(env)()


def _policy(run_or_policy: Policy | str | Path, env: Any, trusted_packages: Sequence[str]) -> Policy:
    """Return the policy, loaded where it is a run or a bundle."""
    if not isinstance(run_or_policy, str | Path):
        return run_or_policy
    path = Path(run_or_policy)
    if not path.is_dir():
        return build_policy({"_target_": "maze.serve.policy.BundlePolicy", "bundle": str(path)})
    with imports_guarded():
        config = StoredRun(path, trusted_packages).deployed("cpu", "state_dict.pt").policy
        policy: Any = build_policy(with_files_of(path, config, "policy"), env)
    policy.spaces.require_same(env, str(path))
    return cast(Policy, policy)
