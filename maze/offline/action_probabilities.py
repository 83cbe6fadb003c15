"""Actions of policies in logged decisions: expectations over actions, and cloned propensities."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from maze.core.agent.action_distribution import ActionDistribution, Arrays, allowed_actions
from maze.core.agent.flat_adam import FlatAdam
from maze.core.env.action_conversion import ActionBounds
from maze.core.errors import ConfigError
from maze.core.trajectory_recording.datasets.logged_steps import Array, LoggedSteps
from maze.core.utils.seeding import seeded_generator
from maze.distributions.utils import isolated_global_generator

MOST_ENUMERATED = 64
"""Sub-steps with at most so many joint actions are averaged over all of them, others over sampled actions."""


def are_enumerated(action_space: spaces.Dict) -> bool:
    """Return whether :func:`candidates` are all joint actions.

    :param action_space: Action space of a sub-step: all heads are `Discrete` from 0 on, with at most
        :data:`MOST_ENUMERATED` joint actions.
    """
    sizes = [part.n for part in action_space.values() if isinstance(part, spaces.Discrete) and part.start == 0]
    return len(sizes) == len(action_space.spaces) and bool(np.prod(sizes) <= MOST_ENUMERATED)


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
        for choices in itertools.product(*(range(n) for n in sizes))
    ]
    weights = np.exp(np.stack([distribution.log_prob(column) for column in columns], 1))
    actions = {head: np.stack([column[head] for column in columns], 1) for head in columns[0]}
    return actions, weights / weights.sum(1, keepdims=True)


def cloned_propensities(
    data: LoggedSteps, action_spaces: Mapping[Any, spaces.Dict], seed: int, n_updates: int = 1000
) -> Array:
    """Estimate the probabilities of the logged actions by cloning the policy that acted, `[n_decisions]`.

    A small network for each sub-step key predicts the choices of each head from the observations. Masked choices have
    probability 0.

    :param data: The decisions.
    :param action_spaces: Action spaces by step key; all heads are `Discrete`.
    :param seed: Of initial weights and minibatches.
    :param n_updates: Gradient steps, of 256 decisions each.
    :raises ConfigError: A head is not `Discrete` from 0 on, or masks exclude actions of the log.
    """
    found, rng = np.empty(len(data)), np.random.default_rng(seed)
    for key, table in data.tables.items():
        n, heads = table.n_actions, action_spaces[key].spaces
        observations = {name: values[:n] for name, values in table.observations.items()}
        masks = allowed_actions(observations, action_spaces[key], {})
        allowed = torch.cat([torch.as_tensor(mask) for mask in masks.values()], 1)
        seen = np.concatenate([np.asarray(values, np.float32).reshape(n, -1) for values in observations.values()], 1)
        inputs = torch.from_numpy((seen - seen.mean(0)) / np.maximum(seen.std(0), 1e-6))
        with isolated_global_generator(seeded_generator(int(rng.integers(2**31)))):
            network = nn.Sequential(nn.Linear(inputs.shape[1], 64), nn.ReLU(), nn.Linear(64, allowed.shape[1]))
        sizes = [mask.shape[1] for mask in masks.values()]
        taken = torch.stack([torch.as_tensor(table.actions[head].astype(np.int64)) for head in heads], 1)

        def log_probs(rows: torch.Tensor) -> torch.Tensor:
            logits = network(inputs[rows]).masked_fill(~allowed[rows], torch.finfo(torch.float32).min)  # noqa: B023
            parts = zip(logits.split(sizes, 1), taken[rows].unbind(1), strict=True)  # noqa: B023
            return torch.stack([-nn.functional.cross_entropy(part, a, reduction="none") for part, a in parts]).sum(0)

        optimizer = FlatAdam({"clone": network}, 2e-3, eps=1e-8)
        for _ in range(n_updates):
            optimizer.zero_grad()
            (-log_probs(torch.from_numpy(rng.integers(n, size=256))).mean()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.inference_mode():
            found[data.positions(key)] = log_probs(torch.arange(n)).double().exp().numpy()
    if n_excluded := int((found == 0).sum()):
        raise ConfigError(f"behaviour=cloned: the action masks exclude {n_excluded} of {len(found)} logged actions.")
    return found
