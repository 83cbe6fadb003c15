"""Rollout policy: simulates the candidates of every decision and takes the best one or the action of a base policy."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import time
import warnings
from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.agent.policy import Policy, acting_in, build_policy
from maze.core.agent.random_policy import RandomPolicy
from maze.core.annotations import override
from maze.core.env.action_conversion import allowed_values, masks_of_heads
from maze.core.env.base_env import BaseEnv
from maze.core.env.batched_maze_env import SingleCoreEnv
from maze.core.env.maze_env import ActionType
from maze.core.env.observation_conversion import ObservationType
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.log_stats.event_decorators import define_episode_stats, define_epoch_stats, define_step_stats
from maze.core.utils.config_utils import duration, number, whole_number
from maze.core.utils.factory import ConfigType, Factory, plain_container
from maze.planning import branches, planner

CANDIDATES = 64
"""Candidates of a decision at most, by default."""
_MOST_SCENARIOS = 2**14
_SCENARIOS = 128
# Share of the decisions whose gain by horizon is measured: neighbouring decisions of an episode are correlated.
_SIMULATED_SHARE = 0.2

Value = Callable[[branches.Group], np.ndarray]
"""Estimate of the return after the horizon for a group of branches, `[n_rows]`."""


def _summed(event: Callable[..., None]) -> Callable[..., None]:
    """Add up an event in each episode."""
    event = define_episode_stats(sum)(define_step_stats(sum)(event))
    return define_epoch_stats(np.mean, output_name="mean_per_episode")(event)


class PlanningEvents(ABC):
    """Statistics of rollout policies."""

    @_summed
    def simulated_decisions(self, count: int) -> None:
        """Branches took decisions.

        :param count: Number of decisions.
        """

    @_summed
    def seconds(self, value: float) -> None:
        """A decision was planned.

        :param value: Duration in seconds.
        """

    @_summed
    def gain(self, value: float) -> None:
        """A decision was planned.

        :param value: Estimated gain of the return over the base policy's action; 0 where that is kept.
        """

    @_summed
    def clairvoyant(self, decisions: int) -> None:
        """A decision was planned with the true future of the episode, as no policy can.

        :param decisions: Number of decisions, 1.
        """


class RolloutPolicy(Policy):
    """Improve a base policy by simulating the candidates of each decision in copies of the environment.

    One-step rollout (Bertsekas, Tsitsiklis and Wu 1997): each candidate is taken in copies whose future is new, the
    base policy continues up to the horizon, and the candidate with the largest mean return is taken if it is shown to
    be better than the base's action; see :class:`~maze.planning.planner.Planner`. Decisions are sub-steps: the base
    policy finishes the step. The base acts deterministically.

    :param base: The policy that is improved, or its configuration.
    :param horizon: Environment steps that are simulated; `None`: to the end of the episode.
    :param scenarios: Scenarios of a candidate at most; `None`: 128, and with a budget as many as that allows.
    :param budget: Budget of a decision: simulated decisions, or a time such as `50ms` or `2s`.
    :param candidates: Candidates of a decision at most. With continuous actions they are samples of the base policy.
    :param gamma: Discount factor of the simulated returns.
    :param confidence: Confidence of the intervals that show a candidate to be better.
    :param value: Estimate of the return after the horizon: `critic` (of the training run that the base comes from), a
        function of observations `[n, ...]` and the actor (or its configuration), or `None`: 0.
    :param n_processes: Worker processes; used where the simulation is not vectorised.
    :param clairvoyant: Plan with the true future of the episode, as no policy can: an upper bound, marked in tables.
    :param action_spaces_dict: Action spaces of the environment, for base policies that take them.
    :raises ConfigError: A value is out of its range.
    """

    def __init__(
        self,
        base: ConfigType,
        horizon: int | None = 20,
        scenarios: int | None = None,
        budget: int | str | None = None,
        candidates: int = CANDIDATES,
        gamma: float = 1.0,
        confidence: float = 0.95,
        value: ConfigType | str | None = None,
        n_processes: int = 1,
        clairvoyant: bool = False,
        action_spaces_dict: Mapping[str | int, spaces.Dict] | None = None,
    ) -> None:
        self.horizon = None if horizon is None else whole_number("policy.horizon", horizon, at_least=1)
        is_time = isinstance(budget, str) and not budget.strip().isdigit()
        count: Any = None if is_time else int(budget) if isinstance(budget, str) else budget
        self.budget = (
            None if count is None else whole_number("policy.budget", count, at_least=1),
            duration("policy.budget", budget) if is_time else None,
        )
        """Simulated decisions and seconds, one of which is `None`."""
        most = _SCENARIOS if budget is None else _MOST_SCENARIOS
        self.scenarios = whole_number("policy.scenarios", most if scenarios is None else scenarios, at_least=1)
        self.candidates = whole_number("policy.candidates", candidates, at_least=2)
        self.gamma = number("policy.gamma", gamma, 0.0, 1.0, above=True)
        self.confidence = number("policy.confidence", confidence, 0.0, 1.0, above=True, below=True)
        self.n_processes = whole_number("policy.n_processes", n_processes, at_least=1)
        if self.n_processes > 1 and multiprocessing.parent_process() is not None:
            raise ConfigError("policy.n_processes: expected 1 in a worker process; or use runner=sequential.")
        self.clairvoyant = bool(clairvoyant)
        if self.clairvoyant:
            self.scenarios = 1
        self.base = build_policy(base, where="policy.base", action_spaces_dict=action_spaces_dict)
        if getattr(self.base, "is_recurrent", False):
            raise ConfigError("policy.base: expected a policy without hidden states, which copies do not have.")
        self.value = _critic(base, self.base) if value == "critic" else value_function(value, "policy.value")
        self._rng = np.random.default_rng()
        self._layers: list[Any] = []
        self._simulate: planner.BranchSimulator | planner.ProcessSimulator | None = None
        self._is_warned = False
        self.last_decision: planner.ActionValues | None = None
        """Candidates of the latest decision with their values."""

    @override(Policy)
    def seed(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.base.seed(seed)

    @override(Policy)
    def needs_env(self) -> bool:
        return True

    @override(Policy)
    def bind(self, env: Any) -> None:
        """Make the copies to plan with.

        :raises ConfigError: No copies can be made, or `scenarios` is 1 in a stochastic environment.
        """
        self.close()
        layers = branches.stack_of(env)
        chance = branches.chance_in(layers[0], "policy: planning")
        if chance and self.scenarios == 1 and not self.clairvoyant:
            reason = "copies of the environment with new futures differ, so that one scenario is not enough"
            raise ConfigError(f"policy.scenarios=1: {reason}. Use more, or policy.clairvoyant=true.")
        self._arrays = None if self.base.needs_env() else branches.simulation_of(layers[0])
        simulation = None if self._arrays is None else self._arrays[0]
        make = functools.partial(_simulator_of, layers[0], simulation, self.base, self.horizon, self.gamma, self.value)
        is_divided = simulation is None and self.n_processes > 1
        self._simulate = planner.ProcessSimulator(self.n_processes, make) if is_divided else make()
        if simulation is not None:
            self._reported = SingleCoreEnv(simulation.batch(1))
        decisions, seconds = self.budget
        self._planner = planner.Planner(
            self._simulate, self.scenarios, self.confidence, decisions, seconds, chance=chance, length=self.horizon
        )
        self._layers = layers

    @property
    def n_simulated(self) -> int:
        """Decisions simulated in the environment that the policy acts in."""
        return 0 if self._simulate is None else self._simulate.n_decisions

    def close(self) -> None:
        """Release the copies and the worker processes."""
        if self._simulate is not None:
            self._simulate.close()
        self._simulate, self._layers = None, []

    @override(Policy)
    def compute_action(
        self,
        observation: ObservationType,
        maze_state: Any,
        env: BaseEnv | None,
        actor_id: ActorID | None = None,
        deterministic: bool = False,
    ) -> ActionType:
        return dict(self.plan(observation, env, actor_id).action)

    @override(Policy)
    def compute_top_action_candidates(
        self,
        observation: ObservationType,
        num_candidates: int | None,
        maze_state: Any,
        env: BaseEnv | None,
        actor_id: ActorID | None = None,
    ) -> tuple[Sequence[ActionType], Sequence[float]]:
        """Rank the candidates by their estimated returns; the one that is taken comes first."""
        found = self.plan(observation, env, actor_id)
        order = sorted(range(len(found.actions)), key=lambda index: (index != found.chosen, -found.values[index]))
        best = order[:num_candidates]
        return [dict(found.actions[index]) for index in best], [float(found.values[index]) for index in best]

    def plan(self, observation: ObservationType, env: Any, actor_id: ActorID | None = None) -> planner.ActionValues:
        """Compare the candidates of the next decision in an environment.

        :param observation: Observation of the actor.
        :param env: The environment with its wrappers; it is not stepped.
        :param actor_id: The actor; `None`: the one that acts next.
        :raises ConfigError: There is no environment, or it cannot be planned with.
        """
        if env is None:
            raise ConfigError("policy: a rollout policy simulates the environment, but none was passed (`env`).")
        layers = branches.stack_of(env)
        if list(map(id, layers)) != list(map(id, self._layers)):
            self.bind(env)
        started, done_before = time.perf_counter(), self.n_simulated
        actor = env.actor_id() if actor_id is None else actor_id
        actions = self._candidates(observation, env, actor)
        seed = None if self.clairvoyant else int(self._rng.integers(2**62))
        try:
            found = self._planner.plan(self._source(layers[0], observation, actor), [actions], seed)[0]
        except NotImplementedError as error:
            raise ConfigError(f"policy: planning needs the state of the environment: {error}") from error
        self.last_decision = found
        if not found.scenarios[0] and len(actions) > 1 and not self._is_warned:
            self._is_warned = True
            warnings.warn(
                f"policy.budget: too small for one scenario of {len(actions)} candidates; the base policy acts.",
                stacklevel=2,
            )
        env.context.pre_step()  # these events belong to the coming step
        events = env.context.event_service.create_event_topic(PlanningEvents)
        events.simulated_decisions(count=self.n_simulated - done_before)
        events.seconds(value=time.perf_counter() - started)
        events.gain(value=found.gain)
        if self.clairvoyant:
            events.clairvoyant(decisions=1)
        return found

    def _source(self, env: Any, observation: Any, actor: ActorID) -> Any:
        """Return the present state of the environment for copies; branches end with a time limit."""
        if self._arrays is None:
            return [branches.SingleState(env, observation)]
        core_env: Any = self._arrays[0].core_env
        if not core_env.is_simulated:
            self._reported.load_maze_state(env.get_maze_state(), actor)
            core_env = self._reported
        found = branches.simulation_of(env)
        if isinstance(self._simulate, planner.BranchSimulator) and found is not None:
            self._simulate.limit = found[1]
        return core_env.simulation

    def _candidates(self, observation: ObservationType, env: Any, actor: ActorID) -> planner.Candidates:
        act = self.base.compute_action
        needs = (env.get_maze_state() if self.base.needs_state() else None, env if self.base.needs_env() else None)
        action = act(observation, *needs, actor, deterministic=True)
        return candidate_actions(
            action, env.action_spaces_dict[actor.step_key], observation, self.candidates, self._rng,
            lambda: act(observation, *needs, actor, deterministic=False),
            lambda n: self.base.compute_top_action_candidates(observation, n, *needs, actor)[0],
        )  # fmt: skip

    def gains(self, env: Any, seeds: Iterable[tuple[int, int]], horizons: Sequence[int], deadline: float) -> np.ndarray:
        """Estimate the gain of planning with several horizons, `[n_decisions, n_horizons]`; closes the environment.

        The decisions are a random choice from episodes of the base policy; see
        :func:`~maze.planning.planner.gains_by_horizon`.

        :param env: The environment.
        :param seeds: Seeds of environment and agent in each episode.
        :param horizons: Environment steps, in rising order.
        :param deadline: When to end, by `time.monotonic`.
        :raises ConfigError: It cannot be planned with.
        """
        self.bind(env)
        act, found, rng = acting_in(env, self.base, deterministic=True), list[np.ndarray](), np.random.default_rng(0)
        simulate, n = self._simulate, self.scenarios
        assert isinstance(simulate, planner.BranchSimulator), "worker processes know one horizon only"
        for env_seed, agent_seed in seeds:
            env.seed(env_seed)
            self.seed(agent_seed)
            observation, done = env.reset(), False
            while not done and time.monotonic() < deadline:
                actor = env.actor_id()
                if rng.random() < _SIMULATED_SHARE and len(actions := self._candidates(observation, env, actor)) > 1:
                    source, seed = self._source(branches.stack_of(env)[0], observation, actor), int(rng.integers(2**62))
                    scenarios = np.tile(np.arange(n), len(actions))
                    first = planner.FirstActions(actions, np.repeat(np.arange(len(actions)), n))
                    rows = np.zeros(len(scenarios), np.int64)
                    returns = simulate.at_horizons(source, rows, scenarios, first, seed, horizons)
                    found.append(planner.gains_by_horizon(returns.reshape(len(horizons), len(actions), n)))
                observation, _, done, _ = env.step(act(observation, actor))
        self.close()
        env.close()
        return np.array(found).reshape(-1, len(horizons))


def _simulator_of(
    env: Any, simulation: Any, base: Policy, horizon: int | None, gamma: float, value: Value | None
) -> planner.BranchSimulator:
    return planner.BranchSimulator(branches.branches_of(env, simulation, gamma), acting(base), horizon, value)


def acting(policy: Policy) -> Callable[[branches.Group], branches.Actions]:
    """Return a function that chooses the deterministic (greedy) actions of a group.

    It evaluates all branches at once if the policy has `compute_actions` and needs neither state nor environment.

    :param policy: The policy.
    """
    compute_actions: Any = getattr(policy, "compute_actions", None)
    needs_state, needs_env = policy.needs_state(), policy.needs_env()
    if compute_actions is not None and not (needs_state or needs_env):
        return lambda group: compute_actions(group.stacked(), group.actor_id, deterministic=True)

    def act(group: branches.Group) -> branches.Actions:
        return [
            policy.compute_action(
                group.single(index),
                group.maze_state(index) if needs_state else None,
                group.envs[index] if needs_env and group.envs is not None else None,
                group.actor_id,
                deterministic=True,
            )
            for index in range(len(group.rows))
        ]

    return act


def candidate_actions(
    base_action: ActionType,
    space: spaces.Dict,
    observation: Mapping[str, Any],
    limit: int,
    rng: np.random.Generator,
    sample: Callable[[], ActionType],
    ranked: Callable[[int], Sequence[ActionType]] | None = None,
) -> list[Mapping[str, Any]]:
    """Return the candidates of a decision, the base policy's action first.

    Discrete actions: all that masks allow; if they are too many, half of them those that the base policy ranks highest,
    as far as it ranks any, and the others a random choice. Others: samples of the base policy or, where that never
    varies, of the action space.

    :param base_action: Action of the base policy.
    :param space: The action space.
    :param observation: The observation, with masks.
    :param limit: Number of candidates at most.
    :param rng: Draws where there are more.
    :param sample: Draws an action of the base policy.
    :param ranked: Returns the actions that the base policy ranks highest, at most the given number; `None`: it ranks
        none.
    """
    if (choices := _choices(space, observation)) is None:
        drawn = [sample() for _ in range(limit - 1)]
        if all(_key(action) == _key(base_action) for action in drawn):
            policy = RandomPolicy({0: space})
            policy.seed(int(rng.integers(2**31)))
            drawn = [policy.compute_action(observation) for _ in range(limit - 1)]
    elif np.prod([len(values) for values in choices.values()], dtype=float) <= limit:
        drawn = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    else:
        drawn = [{head: values[rng.integers(len(values))] for head, values in choices.items()} for _ in range(limit)]
        drawn = [*(ranked(limit // 2) if ranked is not None else ()), *drawn]
    different = {_key(action): action for action in (base_action, *drawn)}
    return list(different.values())[:limit]


def _choices(space: spaces.Dict, observation: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
    """Return the values of each head that masks allow; `None`: some have no finite number."""
    masks = masks_of_heads(observation, space)
    found: dict[str, np.ndarray] = {}
    for head, part in space.spaces.items():
        if not isinstance(part, (spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)):
            return None
        values = allowed_values(part, observation[masks[head]] if head in masks else None)
        if len(values) > 1 and np.prod([len(each) for each in values], dtype=float) > 2**12:
            return None
        found[head] = np.array(list(itertools.product(*values)), part.dtype).reshape(-1, *(part.shape or ()))
    return found


def _key(action: ActionType) -> tuple[bytes, ...]:
    return tuple(np.asarray(action[head], np.float64).tobytes() for head in sorted(action))


def value_function(value: Any, where: str) -> Value | None:
    """Return the estimate of the return after the horizon.

    :param value: A function of observations `[n, ...]` and the actor that acts next, its configuration, or `None`:
        nothing.
    :param where: Its configuration key, for messages.
    :raises ConfigError: It is not a function.
    """
    if value is None:
        return None
    is_config = not (callable(value) or isinstance(value, str))
    found: Any = Factory(object).instantiate(value, config_path=where) if is_config else value
    if not callable(found):
        raise ConfigError(
            f"{where}: expected a function, the `_target_` of a callable object, or null; found {value!r}."
        )
    return lambda group: found(group.stacked(), group.actor_id)


def _critic(config: Any, base: Policy) -> Value:
    """Return the critic of the run that the base policy comes from."""
    from maze.core.agent.serialized_torch_policy import trained_actor_critic

    if (actor_critic := trained_actor_critic(plain_container(config, "policy.base"), base)) is None:
        raise ConfigError(
            "policy.value=critic: expected a base policy of a run with a state critic (A2C, PPO, IMPALA)."
        )

    def estimate(group: branches.Group) -> np.ndarray:
        seen = group.stacked()
        return actor_critic.bootstrap_values(seen, group.actor_id, [seen]).cpu().numpy()

    return estimate
