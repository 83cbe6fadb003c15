"""Fitted Q evaluation: values of a policy, regressed on logged decisions (Le et al. 2019).

A small network for each sub-step key learns by temporal differences. Its last hidden layer then serves as features of
a linear fit whose fixed point is solved exactly (LSTD-Q, Lagoudakis and Parr 2003), for all data and for bootstrap
samples of the episodes (Hao et al. 2021). The network learns from one half of the episodes and the linear fit from the
other one, and conversely (cross-fitting, Chernozhukov et al. 2018): features that follow the noise of the episodes they
are fitted to would make intervals too narrow. Several random halvings are made: values are the mean of all fits, and
bootstrap samples are divided among the halvings, so that intervals contain the variance of the fit and of the features.
They do not contain the bias of features that cannot represent the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from maze.core.agent.action_distribution import ActionDistribution, Arrays, action_distribution
from maze.core.agent.flat_adam import FlatAdam
from maze.core.agent.policy import Policy
from maze.core.agent.torch_state_action_critic import encode_action
from maze.core.env.action_conversion import ActionBounds
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.trajectory_recording.datasets.logged_steps import Array, LoggedSteps
from maze.core.utils.seeding import seeded_generator
from maze.distributions.utils import isolated_global_generator

_EPISODES_AT_ONCE = 256  # whose matrices are kept in memory at the same time
_CHUNK = 512  # actions that are evaluated at once, so that activations stay in the cache
_MOST_ENUMERATED = 64  # joint actions of a sub-step that are averaged over; those of others are sampled


@dataclass(frozen=True)
class FittedQConfig:
    """Settings of the regression.

    :param hidden_units: Width of both hidden layers.
    :param lr: Learning rate of Adam.
    :param batch_size: Decisions in a minibatch.
    :param n_updates: Gradient steps.
    :param target_interval: Gradient steps between two copies of the network into the target network.
    :param n_halvings: Random halvings of the episodes; two networks are trained for each.
    :param n_action_samples: Actions over which values are averaged where they cannot be enumerated.
    :param ridge: Relative weight of the penalty on the coefficients of the linear fit.
    """

    hidden_units: int = 128
    lr: float = 2e-3
    batch_size: int = 256
    n_updates: int = 500
    target_interval: int = 50
    n_halvings: int = 2
    n_action_samples: int = 8
    ridge: float = 1e-6


@dataclass(frozen=True)
class FittedValues:
    """Linear values of an evaluated policy.

    :param coefficients: Of the fit to all episodes, then of those to bootstrap samples, `[1 + n_samples, n_features]`.
    :param of_actions: Features of the logged actions, `[n_decisions, n_features]`.
    :param of_observations: Features of the logged observations, averaged over the policy's actions; same shape.
    :param of_ends: Features of what follows the last decision of each episode, discounted to that decision,
        `[n_episodes, n_features]`; 0 after a termination.
    """

    coefficients: Array
    of_actions: Array
    of_observations: Array
    of_ends: Array

    def of(self, fits: slice) -> tuple[Array, Array, Array]:
        """Return values of the logged actions, of the logged observations, and of what follows the last decisions.

        :param fits: 0: the fit to all episodes; others: those to bootstrap samples. They are the last axis.
        """
        theta = self.coefficients[fits].T
        return self.of_actions @ theta, self.of_observations @ theta, self.of_ends @ theta


def are_enumerated(action_space: spaces.Dict) -> bool:
    """Return whether :func:`candidates` are all joint actions.

    :param action_space: Action space of a sub-step: all heads are `Discrete` from 0 on, with few joint actions.
    """
    sizes = [part.n for part in action_space.values() if isinstance(part, spaces.Discrete) and part.start == 0]
    return len(sizes) == len(action_space.spaces) and bool(np.prod(sizes) <= _MOST_ENUMERATED)


def candidates(
    distribution: ActionDistribution, action_space: spaces.Dict, n_rows: int, n_samples: int, rng: np.random.Generator
) -> tuple[Arrays, Array]:
    """Return actions over which an expectation under a policy is taken: all joint actions, or sampled ones.

    Sampled actions are clipped to the bounds of the space, as environments clip them.

    :param distribution: The policy's distribution in `n_rows` observations.
    :param action_space: Action space of the sub-step.
    :param n_rows: Number of observations.
    :param n_samples: Number of sampled actions of each row, where actions are not enumerated.
    :param rng: Generator for sampling.
    :return: Actions `[n_rows, n_candidates, *shape]` by head, and their weights `[n_rows, n_candidates]`, of sum 1.
    """
    heads = action_space.spaces
    if not are_enumerated(action_space):
        drawn, bounds = [distribution.sample(rng) for _ in range(n_samples)], ActionBounds(action_space)
        actions = {head: bounds.clip_rows(head, np.stack([draw[head] for draw in drawn], 1)) for head in drawn[0]}
        return actions, np.full((n_rows, n_samples), 1.0 / n_samples)
    sizes = [space.n for space in heads.values() if isinstance(space, spaces.Discrete)]
    columns = [
        {head: np.full(n_rows, choice) for head, choice in zip(heads, choices, strict=True)}
        for choices in product(*(range(n) for n in sizes))
    ]
    weights = np.exp(np.stack([distribution.log_prob(column) for column in columns], 1))
    actions = {head: np.stack([column[head] for column in columns], 1) for head in columns[0]}
    return actions, weights / weights.sum(1, keepdims=True)


class _Inputs:
    """Network inputs of a sub-step key: logged and candidate actions with standardised observations.

    Where all actions are candidates, those of an observation that the log contains several times are evaluated once.
    """

    def __init__(
        self,
        data: LoggedSteps,
        key: StepKeyType,
        space: spaces.Dict,
        policy: Policy,
        greedy: bool,
        n_samples: int,
        rng: np.random.Generator,
    ) -> None:
        table = data.tables[key]
        n_rows = len(next(iter(table.observations.values())))
        agents = np.zeros(n_rows, np.int64)
        agents[: table.n_actions] = data.agent_ids[data.positions(key)]
        flat = np.concatenate([np.asarray(v).reshape(n_rows, -1) for v in table.observations.values()], 1)
        first = places = np.arange(n_rows)
        if are_enumerated(space):
            _, first, places = np.unique(np.c_[flat, agents], axis=0, return_index=True, return_inverse=True)
        self.places = torch.from_numpy(places.reshape(-1))
        """Row of each logged observation among the distinct ones."""
        encoded, by_agent, agents = flat.astype(np.float32), np.unique(agents), agents[first]
        encoded = (encoded[first] - encoded.mean(0)) / np.maximum(encoded.std(0), 1e-6)
        if len(by_agent) > 1:
            encoded = np.concatenate([encoded, (agents[:, None] == by_agent).astype(np.float32)], 1)
        self.observations = torch.from_numpy(encoded.clip(-10.0, 10.0).astype(np.float32))
        self.logged = _encoded(space, table.actions)
        parts = []
        for agent in by_agent:
            rows = np.flatnonzero(agents == agent)
            seen = {name: values[first[rows]] for name, values in table.observations.items()}
            distribution = action_distribution(policy, seen, ActorID(key, int(agent)), space, greedy)
            parts.append((rows, *candidates(distribution, space, len(rows), n_samples, rng)))
        order = np.concatenate([rows for rows, _, _ in parts]).argsort()
        actions = {head: np.concatenate([chosen[head] for _, chosen, _ in parts])[order] for head in space.spaces}
        weights = np.concatenate([weight for _, _, weight in parts])[order]
        self.weights = torch.from_numpy(weights.astype(np.float32))
        self.candidates = _encoded(space, actions)
        self.followed = data.followed_by(key)
        """Decisions that an observation of the step key follows."""

    @property
    def size(self) -> int:
        return self.observations.shape[1] + self.logged.shape[1]

    def of_logged(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.observations[self.places[rows]], self.logged[rows]], -1)

    def of_drawn(self, rows: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        """Return one candidate for each observation, drawn by the weights."""
        rows = self.places[rows]
        below = self.weights[rows].cumsum(1) < torch.from_numpy(rng.random((len(rows), 1)))
        place = below.sum(1).clamp(max=self.weights.shape[1] - 1)
        return torch.cat([self.observations[rows], self.candidates[rows, place]], -1)

    def of_candidates(self, distinct: torch.Tensor) -> torch.Tensor:
        actions = self.candidates[distinct]
        seen = self.observations[distinct].unsqueeze(1).expand(-1, actions.shape[1], -1)
        return torch.cat([seen, actions], -1)


class _Layer(torch.nn.Module):
    """A linear layer for each member, with the initial weights of `nn.Linear`: `[n_members, B, n_inputs]`."""

    def __init__(self, n_members: int, n_inputs: int, n_outputs: int) -> None:
        super().__init__()
        bound = n_inputs**-0.5
        self.weight = torch.nn.Parameter(torch.empty(n_members, n_inputs, n_outputs).uniform_(-bound, bound))
        self.bias = torch.nn.Parameter(torch.empty(n_members, 1, n_outputs).uniform_(-bound, bound))

    def forward(self, inputs: torch.Tensor, member: int | slice) -> torch.Tensor:
        return inputs @ self.weight[member] + self.bias[member]


class _Networks(torch.nn.Module):
    """A network for each half of the episodes, evaluated together: `[n_members, B, n_inputs]` to `[n_members, B]`.

    With one `member`: `[B, n_inputs]` to `[B]`.
    """

    def __init__(self, n_members: int, n_inputs: int, n_units: int) -> None:
        super().__init__()
        self.first = _Layer(n_members, n_inputs, n_units)
        self.second = _Layer(n_members, n_units, n_units)
        self.last = _Layer(n_members, n_units, 1)

    def hidden(self, inputs: torch.Tensor, member: int | slice) -> torch.Tensor:
        return torch.tanh(self.second(torch.relu(self.first(inputs, member)), member))

    def forward(self, inputs: torch.Tensor, member: int | slice = slice(None)) -> torch.Tensor:
        return torch.as_tensor(self.last(self.hidden(inputs, member), member).squeeze(-1))


def fit_q(
    data: LoggedSteps,
    policy: Policy,
    action_spaces: Mapping[StepKeyType, spaces.Dict],
    gamma: float,
    bootstrap: Array,
    seed: int,
    config: FittedQConfig | None = None,
    greedy: bool = False,
) -> FittedValues:
    """Fit the values of a policy on logged decisions.

    Decisions without a known target (:attr:`LoggedSteps.has_target`) are left out of the fit.

    :param data: The decisions.
    :param policy: The evaluated policy.
    :param action_spaces: Action spaces by step key.
    :param gamma: Discount per environment step.
    :param bootstrap: Weights of the episodes in bootstrap samples, `[n_samples, n_episodes]`.
    :param seed: Seed of initial weights, minibatches and sampled actions.
    :param config: Settings of the regression.
    :param greedy: Evaluate the greedy actions of a torch policy.
    """
    config = config or FittedQConfig()
    rng = np.random.default_rng(seed)
    inputs = {
        key: _Inputs(data, key, action_spaces[key], policy, greedy, config.n_action_samples, rng) for key in data.tables
    }
    n = config.n_halvings
    halves = np.stack([rng.permutation(data.n_episodes) % 2 == 0 for _ in range(n)])
    fitted = np.stack([halves, ~halves], 1).reshape(2 * n, -1)
    networks = _trained(data, inputs, gamma, config, rng, ~fitted)
    fits = []
    for index, of_half in enumerate(fitted):
        with torch.inference_mode():
            phi, following, expected = _features(data, inputs, networks, index)
        following *= data.discounts(gamma)[:, None]
        samples = np.concatenate([np.ones((1, data.n_episodes)), bootstrap[index // 2 :: n]]) * of_half
        fits.append(_solved(data, phi, expected, following, samples, config.ridge))
    n_features = fits[0].of_actions.shape[1]
    coefficients = np.zeros((1 + len(bootstrap), 2 * n * n_features))
    for index, fit in enumerate(fits):
        own = slice(index * n_features, (index + 1) * n_features)
        coefficients[0, own] = fit.coefficients[0] / (2 * n)
        coefficients[1 + index // 2 :: n, own] = fit.coefficients[1:] / 2
    parts = zip(*((fit.of_actions, fit.of_observations, fit.of_ends) for fit in fits), strict=True)
    return FittedValues(coefficients, *(np.concatenate(part, 1) for part in parts))


def _trained(
    data: LoggedSteps,
    inputs: Mapping[Any, _Inputs],
    gamma: float,
    config: FittedQConfig,
    rng: np.random.Generator,
    episodes: Array,
) -> dict[Any, _Networks]:
    """Train networks, each on some of the episodes.

    :param episodes: Whether an episode is one of those of a member, `[n_members, n_episodes]`.
    """
    n_members = len(episodes)
    with isolated_global_generator(seeded_generator(int(rng.integers(2**31)))):
        networks = {key: _Networks(n_members, part.size, config.hidden_units) for key, part in inputs.items()}
    discounts = data.discounts(gamma)
    scale = float(np.abs(data.rewards).std() + np.abs(data.rewards).mean()) / max(1.0 - min(gamma, 0.99), 1e-2) or 1.0
    rewards = torch.from_numpy((data.rewards / scale).astype(np.float32))
    optimizer = FlatAdam(networks, config.lr, eps=1e-8)
    targets, following = torch.zeros(n_members, len(data)), np.zeros((n_members, len(data)))
    is_usable = data.has_target & np.repeat(episodes, data.lengths, axis=1)
    # by key: positions of each member's decisions, usable ones first; how many are usable, and whether any; batch size
    drawing: dict[Any, tuple[Array, Array, torch.Tensor, int]] = {}
    for key in inputs:
        positions = data.positions(key)
        found = is_usable[:, positions]
        if n_found := found.sum():
            ordered = positions[np.argsort(~found, axis=1, kind="stable")]
            size = max(1, round(config.batch_size * n_found / is_usable.sum()))
            drawing[key] = (ordered, found.sum(1, keepdims=True), torch.from_numpy(found.any(1)), size)
    for update in range(config.n_updates if drawing else 0):
        if update % config.target_interval == 0:
            with torch.inference_mode():
                for member, (key, part) in product(range(n_members), inputs.items()):
                    own = part.followed[is_usable[member, part.followed]]
                    # values of what follows, with actions drawn from the policy
                    chunks = (part.of_drawn(rows, rng) for rows in _chunks(data.next_rows[own], 1))
                    following[member, own] = torch.cat([networks[key](each, member) for each in chunks]).numpy()
                targets = rewards + torch.from_numpy(discounts * following).float()
        loss = torch.zeros(())
        for key, (ordered, counts, is_any, size) in drawing.items():
            places = (rng.random((n_members, size)) * counts).astype(np.int64)
            drawn = np.take_along_axis(ordered, places, 1)
            values = networks[key](inputs[key].of_logged(torch.from_numpy(data.rows[drawn])))
            squared = (values - targets.gather(1, torch.from_numpy(drawn))).square().mean(1)
            loss = loss + squared[is_any].sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return networks


def _features(
    data: LoggedSteps, inputs: Mapping[Any, _Inputs], networks: Mapping[Any, _Networks], member: int
) -> tuple[Array, Array, Array]:
    """Return features of logged actions, of the policy's next actions, and of observations: `[n_decisions, size]`."""
    widths = {key: network.second.bias.shape[-1] + 1 for key, network in networks.items()}
    total, begin = sum(widths.values()), 0
    phi, following, expected = (np.zeros((len(data), total)) for _ in range(3))
    for key, part in inputs.items():
        network, place = networks[key], slice(begin, begin + widths[key])
        begin += widths[key]
        positions = data.positions(key)
        of_logged = [network.hidden(part.of_logged(rows), member) for rows in _chunks(data.rows[positions], 1)]
        phi[positions, place] = _with_bias(torch.cat(of_logged))
        n_distinct, n_candidates = part.weights.shape
        means = [
            (part.weights[rows].unsqueeze(1) @ network.hidden(part.of_candidates(rows), member)).squeeze(1)
            for rows in _chunks(np.arange(n_distinct), n_candidates)
        ]
        of_rows = _with_bias(torch.cat(means))[part.places]
        expected[positions, place] = of_rows[data.rows[positions]]
        following[part.followed, place] = of_rows[data.next_rows[part.followed]]
    return phi, following, expected


def _chunks(rows: Array, n_actions: int) -> Sequence[torch.Tensor]:
    return torch.split(torch.from_numpy(rows), max(1, _CHUNK // n_actions))


def _with_bias(features: torch.Tensor) -> Array:
    return np.concatenate([features.double().numpy(), np.ones((len(features), 1))], 1)


def _solved(
    data: LoggedSteps, phi: Array, expected: Array, following: Array, samples: Array, ridge: float
) -> FittedValues:
    """Solve `sum phi (phi - gamma phi')^T theta = sum phi r` for samples of the episodes.

    :param samples: Weights of the episodes in each sample, `[n_samples, n_episodes]`.
    """
    n_features = phi.shape[1]
    starts, ends = data.episode_starts[:-1], data.episode_starts[1:]
    fitted = phi * data.has_target[:, None]
    sampled = np.zeros((len(samples), n_features, n_features))
    sides = np.zeros((len(samples), n_features))
    used = np.flatnonzero(samples.any(0))
    for first in range(0, len(used), _EPISODES_AT_ONCE):
        part = used[first : first + _EPISODES_AT_ONCE]
        episodes = [slice(start, end) for start, end in zip(starts[part], ends[part], strict=True)]
        matrices = np.stack([fitted[rows].T @ (phi[rows] - following[rows]) for rows in episodes])
        sampled += np.tensordot(samples[:, part], matrices, 1)
        sides += samples[:, part] @ np.stack([fitted[rows].T @ data.rewards[rows] for rows in episodes])
    sampled += np.eye(n_features) * ridge * len(data) * float((phi**2).mean())
    thetas = np.linalg.solve(sampled, sides[..., None])[..., 0]
    return FittedValues(thetas, phi, expected, following[ends - 1])


def _encoded(space: spaces.Dict, actions: Arrays) -> torch.Tensor:
    from_zero = {head: torch.as_tensor(actions[head] - getattr(part, "start", 0)) for head, part in space.items()}
    return torch.cat([encode_action(part, from_zero[head], torch.float32) for head, part in space.items()], -1)
