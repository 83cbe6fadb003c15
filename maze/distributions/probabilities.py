"""Probabilities of actions in NumPy, and the ranking of discrete ones, from logits and described distributions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maze.core.errors import ConfigError
from maze.distributions.samplers import (
    MAX_LOG_STD,
    MAX_LOG_STD_BEFORE_SQUASHING,
    MIN_LOG_STD,
    Array,
    HeadDescription,
    categorical_sizes,
)

_EPS = np.finfo(np.float32).eps


def _choices(head: HeadDescription, logits: Array, temperature: float) -> list[Array]:
    """Return the probabilities `[batch, n_choices]` of all choices that an action consists of."""
    scaled = logits.reshape(len(logits), -1).astype(np.float64) / temperature
    if head["distribution"] == "bernoulli":
        ones = 0.5 + 0.5 * np.tanh(0.5 * scaled)
        return list(np.stack([1.0 - ones, ones], axis=-1).swapaxes(0, 1))
    sizes = categorical_sizes(head)
    parts = np.split(scaled, np.cumsum(sizes)[:-1], axis=1) if sizes else []
    weights = [np.exp(part - part.max(1, keepdims=True)) for part in parts]
    return [weight / weight.sum(1, keepdims=True) for weight in weights]


def probabilities_of(head: HeadDescription, logits: Array, actions: Array, temperature: float = 1.0) -> Array | None:
    """Return the probability (density) of one action for each row; None where it has no formula here (beta).

    :param logits: `[batch, ...]`.
    :param actions: `[batch, *space.shape]`.
    :param temperature: Below 1 sharpens the distribution, above 1 flattens it.
    :return: `[batch]`.
    """
    chosen = actions.reshape(len(actions), -1)
    if head["distribution"] in ("gaussian", "squashed_gaussian"):
        return _gaussian_density(head, logits.astype(np.float64), chosen.astype(np.float64), temperature)
    factors, rows = _choices(head, logits, temperature), np.arange(len(logits))
    if not factors:
        return None
    return np.asarray(
        np.prod([factor[rows, chosen[:, part].astype(np.int64)] for part, factor in enumerate(factors)], axis=0)
    )


def _gaussian_density(head: HeadDescription, logits: Array, actions: Array, temperature: float) -> Array:
    mean, log_std = (part.reshape(len(logits), -1) for part in np.split(logits, 2, axis=-1))
    is_squashed = head["distribution"] == "squashed_gaussian"
    log_std = np.clip(log_std, MIN_LOG_STD, MAX_LOG_STD_BEFORE_SQUASHING if is_squashed else MAX_LOG_STD)
    log_std += 0.5 * math.log(temperature)
    log_jacobian = np.zeros_like(actions)
    if is_squashed:
        low, half = head["low"].reshape(-1), 0.5 * (head["high"] - head["low"]).reshape(-1).astype(np.float64)
        inside = np.clip((actions - low) / half - 1.0, -1.0 + _EPS, 1.0 - _EPS)
        actions, log_jacobian = np.arctanh(inside), np.log(half * (1.0 - inside**2))
    errors = (actions - mean) / np.exp(log_std)
    log_density = -0.5 * errors**2 - log_std - 0.5 * math.log(2.0 * math.pi) - log_jacobian
    return np.asarray(np.exp(log_density.sum(1)))


def uniform_logits(head: HeadDescription, logits: Array) -> Array:
    """Return the logits of the uniform distribution over the actions that no mask excludes.

    :param logits: `[batch, ...]`; masked ones are the smallest finite number or minus infinity.
    """
    if head["distribution"] == "bernoulli":
        return np.zeros_like(logits)
    return np.where(logits > np.finfo(logits.dtype).min, np.zeros_like(logits), logits)


def most_probable(factors: Sequence[Array], n_best: int | None) -> list[tuple[tuple[int, ...], float]]:
    """Return the most probable combinations of independent choices, best first, with their probabilities.

    The k best combinations are made of the k best choices of each factor.

    :param factors: Probabilities `[n_choices]` of each.
    :param n_best: How many at most; None: all.
    """
    chosen, probabilities = np.empty((1, 0), np.int64), np.ones(1)
    for factor in factors:
        best = np.argsort(-factor, kind="stable")[:n_best]
        joint = np.multiply.outer(probabilities, factor[best])
        order = np.argsort(-joint, axis=None, kind="stable")[:n_best]
        before, choices = np.unravel_index(order, joint.shape)
        chosen = np.concatenate([chosen[before], best[choices, np.newaxis]], axis=1)
        probabilities = joint[before, choices]
    return list(zip(map(tuple, chosen.tolist()), probabilities.tolist(), strict=True))


def ranked_actions(
    heads: Mapping[str, HeadDescription], logits: Mapping[str, Array], n_best: int | None, temperature: float = 1.0
) -> list[tuple[dict[str, Any], float]]:
    """Return the most probable joint actions of heads that are independent of one another, best first.

    :param heads: The heads.
    :param logits: Of one observation, `[n_logits]` by head.
    :param n_best: How many at most; None: all.
    :param temperature: Below 1 sharpens the distributions, above 1 flattens them.
    :return: Actions by head, with their probabilities.
    :raises ConfigError: A head is continuous.
    """
    factors: list[Array] = []
    parts: dict[str, slice] = {}
    for head, of_head in logits.items():
        probabilities = [factor[0] for factor in _choices(heads[head], of_head[np.newaxis], temperature)]
        if not probabilities:
            raise ConfigError(f"Action head `{head}` is continuous; its actions cannot be ranked. Request one action.")
        parts[head] = slice(len(factors), len(factors) + len(probabilities))
        factors += probabilities
    # the k best joint actions are made of the k best choices of each factor
    ranked = most_probable(factors, n_best)
    return [({head: _joined(heads[head], chosen[part]) for head, part in parts.items()}, p) for chosen, p in ranked]


def _joined(head: HeadDescription, choices: Sequence[int]) -> Any:
    """Return the action of a head that consists of choices, `[*space.shape]`."""
    if head["distribution"] == "categorical":
        return np.int64(choices[0])
    return np.array(choices).reshape(np.shape(head["nvec"]) if "nvec" in head else tuple(head["shape"]))
