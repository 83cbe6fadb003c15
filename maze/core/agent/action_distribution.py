"""Probabilities of actions under policies: networks, random ones, heuristics, and heuristics that explore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import spaces

from maze.core.agent.policy import Policy, build_policy
from maze.core.agent.random_policy import RandomPolicy
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.env.action_conversion import masked_heads
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.trajectory_recording.datasets.logged_steps import Array, LoggedSteps
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.utils.config_utils import number
from maze.core.utils.factory import ConfigType
from maze.distributions.dict import DictProbabilityDistribution
from maze.distributions.utils import sample_with

Arrays = dict[str, Array]
_COMPARED = 64  # actions of which the sampled and the deterministic ones are compared


class ActionDistribution(Protocol):
    """A policy's distribution over joint actions in a batch of observations."""

    def log_prob(self, actions: Mapping[str, Array]) -> Array:
        """Return the log-probability (density) of one action for each row.

        :param actions: `[n, *shape]` by head.
        :return: `[n]`; minus infinity where the policy never takes the action.
        """

    def sample(self, rng: np.random.Generator) -> Arrays:
        """Return one action for each row, `[n, *shape]` by head."""


class NetworkActions:
    """Distribution of a torch policy's networks."""

    def __init__(self, distribution: DictProbabilityDistribution) -> None:
        self._distribution = distribution

    def log_prob(self, actions: Mapping[str, Array]) -> Array:
        heads = self._distribution.distribution_dict
        tensors = {head: torch.as_tensor(np.asarray(actions[head])) for head in heads}
        with torch.inference_mode():
            return np.asarray(self._distribution.joint_log_prob(tensors).double().cpu().numpy())

    def sample(self, rng: np.random.Generator) -> Arrays:
        generator = torch.Generator()
        generator.manual_seed(int(rng.integers(2**63)))
        with torch.inference_mode():
            return {
                head: sample_with(distribution, generator).cpu().numpy()
                for head, distribution in self._distribution.distribution_dict.items()
            }


class ChosenActions:
    """A policy that takes one action for certain, `[n, *shape]` by head; continuous ones have no density (NaN)."""

    def __init__(self, actions: Arrays) -> None:
        self._actions = actions

    def log_prob(self, actions: Mapping[str, Array]) -> Array:
        n = _n_rows(self._actions)
        same = np.ones(n, np.bool_)
        if any(chosen.dtype.kind == "f" for chosen in self._actions.values()):
            return np.full(n, np.nan)
        for head, chosen in self._actions.items():
            same &= (np.asarray(actions[head]) == chosen).reshape(n, -1).all(1)
        return np.asarray(np.where(same, 0.0, -np.inf))

    def sample(self, rng: np.random.Generator) -> Arrays:
        return self._actions


class UniformActions:
    """Uniform distribution over the allowed actions of discrete heads.

    :param allowed: `[n, n_choices]` by head, at least one allowed choice in each row.
    """

    def __init__(self, allowed: Mapping[str, Array]) -> None:
        self._allowed = allowed

    def log_prob(self, actions: Mapping[str, Array]) -> Array:
        found = np.zeros(_n_rows(self._allowed))
        with np.errstate(divide="ignore"):
            for head, allowed in self._allowed.items():
                is_allowed = allowed[np.arange(len(allowed)), actions[head]]
                found += np.log(is_allowed / allowed.sum(1))
        return found

    def sample(self, rng: np.random.Generator) -> Arrays:
        return {
            head: np.where(allowed, rng.random(allowed.shape), -1.0).argmax(1)
            for head, allowed in self._allowed.items()
        }


class Mixture:
    """With probability `epsilon` another distribution, otherwise the base.

    :param base: Distribution with probability `1 - epsilon`.
    :param other: Distribution with probability `epsilon`, over the same rows and heads.
    :param epsilon: In [0, 1]; the same for all rows.
    """

    def __init__(self, base: ActionDistribution, other: ActionDistribution, epsilon: float) -> None:
        self._base, self._other, self._epsilon = base, other, epsilon

    def log_prob(self, actions: Mapping[str, Array]) -> Array:
        with np.errstate(divide="ignore"):
            base = np.log1p(-self._epsilon) + self._base.log_prob(actions)
            return np.asarray(np.logaddexp(base, np.log(self._epsilon) + self._other.log_prob(actions)))

    def sample(self, rng: np.random.Generator) -> Arrays:
        base, other = self._base.sample(rng), self._other.sample(rng)
        explores = rng.random(_n_rows(base)) < self._epsilon
        return {
            head: np.where(explores.reshape(-1, *[1] * (values.ndim - 1)), other[head], values)
            for head, values in base.items()
        }


class ExploringPolicy(Policy):
    """Take the action of another policy, or with probability `epsilon` any allowed action.

    :param base: A heuristic or a policy, or its configuration.
    :param epsilon: Probability of a random action, in [0, 1].
    :param action_spaces_dict: Action spaces by step key; exploration needs `Discrete` heads.
    """

    def __init__(
        self, base: Policy | ConfigType, epsilon: float, action_spaces_dict: Mapping[Any, spaces.Dict]
    ) -> None:
        self.base = build_policy(base, where="policy.base", action_spaces_dict=action_spaces_dict)
        self.is_recurrent = self.base.is_recurrent
        self.epsilon = number("policy.epsilon", epsilon, 0.0, 1.0)
        self._random = RandomPolicy(dict(action_spaces_dict))
        self._rng = np.random.default_rng()

    @override(Policy)
    def seed(self, seed: int) -> None:
        children = np.random.SeedSequence(seed).generate_state(3)
        self._rng = np.random.default_rng(children[0])
        self._random.seed(int(children[1]))
        self.base.seed(int(children[2]))

    @override(Policy)
    def bind(self, env: Any) -> None:
        self.base.bind(env)

    @override(Policy)
    def needs_state(self) -> bool:
        return self.base.needs_state()

    @override(Policy)
    def needs_env(self) -> bool:
        return self.base.needs_env()

    @override(Policy)
    def compute_action(
        self,
        observation: Any,
        maze_state: Any = None,
        env: Any = None,
        actor_id: ActorID | None = None,
        deterministic: bool = False,
    ) -> Any:
        explores = not deterministic and self._rng.random() < self.epsilon
        if not explores or self.is_recurrent:  # hidden states carry all observations
            action = self.base.compute_action(observation, maze_state, env, actor_id, deterministic)
            if not explores:
                return action
        return self._random.compute_action(observation, actor_id=actor_id)


def action_distribution(
    policy: Policy, observations: Arrays, actor: ActorID, action_space: spaces.Dict, deterministic: bool = False
) -> ActionDistribution:
    """Return the distribution of a policy's joint actions.

    :param policy: A torch policy; an exploring or random one; or any policy that acts on observations alone, which is
        taken for deterministic.
    :param observations: `[n, *shape]` by key.
    :param actor: The acting actor.
    :param action_space: Action space of the sub-step.
    :param deterministic: Evaluate the greedy actions of a torch policy instead of its distribution.
    :raises ConfigError: The policy needs the simulator or recurrent states, which a log does not hold, or it samples
        actions without stating their probabilities.
    """
    if policy.is_recurrent or policy.needs_state() or policy.needs_env():
        needed = "recurrent states" if policy.is_recurrent else "the simulator"
        raise ConfigError(f"{type(policy).__name__} needs {needed} to act, but a log holds observations only.")
    if isinstance(policy, TorchPolicy) and not deterministic:
        with torch.inference_mode():
            return NetworkActions(
                policy.compute_substep_policy_output(observations, actor, policy.temperature).prob_dist
            )
    if isinstance(policy, RandomPolicy):
        return UniformActions(allowed_actions(observations, action_space, policy.masks))
    if isinstance(policy, ExploringPolicy):
        base = action_distribution(policy.base, observations, actor, action_space, deterministic)
        if deterministic or not policy.epsilon:
            return base
        return Mixture(base, UniformActions(allowed_actions(observations, action_space, {})), policy.epsilon)
    chosen = chosen_actions(policy, observations, actor)
    if not chosen.keys() >= action_space.spaces.keys():
        where = f"{type(policy).__name__}, sub-step {actor.step_key!r}"
        raise ConfigError(f"{where}: expected actions {sorted(action_space.spaces)}, found {sorted(chosen)}.")
    chosen = {head: chosen[head] for head in action_space.spaces}  # as environments ignore others
    if not deterministic:
        first = {key: values[:_COMPARED] for key, values in observations.items()}
        sampled = chosen_actions(policy, first, actor, deterministic=False)
        if any(not np.array_equal(values[:_COMPARED], sampled[head]) for head, values in chosen.items()):
            hint = "Estimate its greedy actions: `runner.deterministic=true`, in `evidence` `deterministic: true`."
            raise ConfigError(f"{type(policy).__name__} samples its actions with unknown probabilities. {hint}")
    for head, space in action_space.spaces.items():
        if not isinstance(space, spaces.Discrete):
            continue
        outside = (chosen[head] < space.start) | (chosen[head] >= space.start + space.n)
        if outside.any():
            found = chosen[head][outside].flat[0]
            expected = f"actions of {space} for the head `{head}`"
            raise ConfigError(f"{type(policy).__name__}: expected {expected}, found {found}.")
    return ChosenActions(chosen)


def log_probabilities(
    data: LoggedSteps, policy: Policy, action_spaces: Mapping[Any, spaces.Dict], greedy: bool = False
) -> Array:
    """Return log-probabilities (densities) of the logged actions under a policy.

    :param data: The logged decisions.
    :param policy: A policy that :func:`action_distribution` accepts.
    :param action_spaces: Action spaces by step key.
    :param greedy: Evaluate the greedy actions of a torch policy instead of its distribution.
    :return: `[n_decisions]`, in the order of the log. Minus infinity where the policy never takes the action; NaN for
        continuous actions of a deterministic policy.
    :raises ConfigError: See :func:`action_distribution`.
    """
    found = np.empty(len(data))
    for key, chosen, distribution in distributions_of(data, policy, action_spaces, greedy):
        found[chosen] = distribution.log_prob(
            {head: values[data.rows[chosen]] for head, values in data.tables[key].actions.items()}
        )
    return found


def distributions_of(
    data: LoggedSteps, policy: Policy, action_spaces: Mapping[Any, spaces.Dict], greedy: bool
) -> Iterator[tuple[Any, Array, ActionDistribution]]:
    """Yield a policy's distributions in the decisions of each actor.

    :param data: The logged decisions.
    :param policy: A policy that :func:`action_distribution` accepts.
    :param action_spaces: Action spaces by step key.
    :param greedy: Evaluate the greedy actions of a torch policy instead of its distribution.
    :return: Step key, positions of the actor's decisions in the log, `[n]`, and distribution over `n` rows.
    """
    for key, table in data.tables.items():
        positions = data.positions(key)
        for agent in np.unique(data.agent_ids[positions]):
            chosen = positions[data.agent_ids[positions] == agent]
            observations = {name: values[data.rows[chosen]] for name, values in table.observations.items()}
            actor = ActorID(key, int(agent))
            yield key, chosen, action_distribution(policy, observations, actor, action_spaces[key], greedy)


def propensities(
    policy: Policy, records: Sequence[SpacesRecord], action_spaces: Mapping[Any, spaces.Dict]
) -> Array | None:
    """Return the probabilities (densities) of the sampled actions of an episode, `[n_records]`.

    `None`: they are unknown, as of heuristics without exploration and of recurrent policies.

    :param policy: The policy that acted.
    :param records: Actors, observations, actions and rewards.
    :param action_spaces: Action spaces by step key.
    """
    if not isinstance(policy, TorchPolicy | RandomPolicy | ExploringPolicy):
        return None
    try:
        data = LoggedSteps.of_episodes([list(enumerate(records))])
        return np.asarray(np.exp(log_probabilities(data, policy, action_spaces)))
    except ConfigError:
        return None


def allowed_actions(observations: Arrays, action_space: spaces.Dict, masks: Mapping[str, str]) -> Arrays:
    """Return the choices that masks allow, bool `[n, n_choices]` by head; all of them where a mask allows none.

    :param observations: `[n, *shape]` by key.
    :param action_space: Action space of the sub-step; its heads are `Discrete` from 0 on.
    :param masks: Head of each mask whose name does not tell it.
    :raises ConfigError: A head is of another kind.
    """
    n = _n_rows(observations)
    shapes = {key: values.shape[1:] for key, values in observations.items()}
    mask_of = {head: mask for mask, head in masked_heads(shapes, action_space, masks)[0].items()}
    allowed = {}
    for head, space in action_space.spaces.items():
        if not isinstance(space, spaces.Discrete) or space.start != 0:
            raise ConfigError(f"Action head `{head}`: random or cloned actions need Discrete from 0 on, found {space}.")
        mask = np.ones((n, int(space.n)), np.bool_) if head not in mask_of else observations[mask_of[head]] > 0
        allowed[head] = mask | ~mask.any(1, keepdims=True)
    return allowed


def chosen_actions(
    policy: Policy, observations: Arrays, actor: ActorID, deterministic: bool = True, **more: Any
) -> Arrays:
    """Return a policy's actions in several observations, `[n, *shape]` by head.

    :param policy: A policy that acts on observations alone; evaluated for all at once where it has `compute_actions`.
    :param observations: `[n, *shape]` by key.
    :param actor: The acting actor.
    :param deterministic: Choose the greedy actions instead of sampled ones.
    :param more: Further arguments of `compute_actions`, such as hidden states.
    """
    in_batches: Any = getattr(policy, "compute_actions", None)
    if in_batches is not None:
        return dict(in_batches(observations, actor, deterministic=deterministic, **more))
    rows = ({key: values[row] for key, values in observations.items()} for row in range(_n_rows(observations)))
    chosen = [policy.compute_action(row, None, None, actor, deterministic) for row in rows]
    return {head: np.stack([np.asarray(action[head]) for action in chosen]) for head in chosen[0]}


def _n_rows(arrays: Mapping[str, Array]) -> int:
    return len(next(iter(arrays.values())))
