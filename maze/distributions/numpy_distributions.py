"""Action distributions in NumPy: samples and probabilities from logits and distributions that are described as data.

Nothing here needs torch or spaces, so that a policy can act where neither is installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from maze.core.errors import ConfigError, EnvironmentContractError, MazeError, NonFiniteError

MIN_LOG_STD = -20.0
MAX_LOG_STD = 20.0
MAX_LOG_STD_BEFORE_SQUASHING = 2.0
MAX_CONCENTRATION = 1e4
"""Beyond it float32 cannot tell a Beta density's logarithm from rounding errors."""

Array = np.ndarray[Any, Any]
Sampler = Callable[[Array, "np.random.Generator | None", float], Array]
"""From logits `[batch, ...]`, a generator (None: the most likely actions) and a temperature to actions
`[batch, ...]`."""
HeadDescription = Mapping[str, Any]
"""The distribution of an action head: `distribution` (a key of the samplers here), and what it needs of `n`, `nvec`,
`shape`, `dtype`, `low`, `high` and `is_greedy`."""

_TINY = np.finfo(np.float64).tiny
_EPS = np.finfo(np.float32).eps
# Masks put this in the place of a logit.
_MASKED = np.finfo(np.float32).min
# A sum of squares below this is one of finite numbers, of which none masks a choice.
_UNSUSPICIOUS = 1e12


def sampler_of(head: HeadDescription) -> Sampler:
    """Return the sampler of a described distribution. It keeps no state between calls.

    :param head: The distribution, with the keys that it needs.
    :raises KeyError: There is no such distribution, or a key is missing.
    """
    return _SAMPLERS[head["distribution"]](head)


def categorical_sizes(head: HeadDescription) -> list[int]:
    """Return how logits split into categorical choices; empty for other distributions."""
    if head["distribution"] == "categorical":
        return [int(head["n"])]
    return [int(n) for n in np.ravel(head["nvec"])] if head["distribution"] == "multi_categorical" else []


def _at(temperature: float, logits: Array) -> Array:
    """Return logits at a temperature, in double precision, in which masked logits do not underflow."""
    return logits if temperature == 1.0 else np.divide(logits, temperature, dtype=np.float64)


class _Categorical:
    """Exponential race: argmax of logit - log(exponential noise) follows the softmax of the logits."""

    def __init__(self, head: HeadDescription) -> None:
        self._is_greedy = bool(head.get("is_greedy"))

    def __call__(self, logits: Array, rng: np.random.Generator | None, temperature: float = 1.0) -> Array:
        choices: Array
        if rng is None or self._is_greedy:
            choices = logits.argmax(-1)
            return choices
        noise = np.empty(logits.shape, np.float64)  # not kept: threads may share the sampler
        rng.standard_exponential(out=noise)
        np.add(noise, _TINY, noise)  # zero has no logarithm
        np.log(noise, noise)
        np.subtract(_at(temperature, logits), noise, noise)
        choices = noise.argmax(-1)
        return choices


class _MultiCategorical:
    def __init__(self, head: HeadDescription) -> None:
        self._choose = _Categorical(head)
        nvec = np.asarray(head["nvec"])
        self._shape = nvec.shape
        ends = np.cumsum(nvec.flatten()).tolist()
        self._slices = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def __call__(self, logits: Array, rng: np.random.Generator | None, temperature: float = 1.0) -> Array:
        actions = np.empty((len(logits), len(self._slices)), np.int64)
        for index, part in enumerate(self._slices):
            actions[:, index] = self._choose(logits[:, part], rng, temperature)
        return actions.reshape(len(logits), *self._shape)


def _bernoulli(logits: Array, rng: np.random.Generator | None, temperature: float = 1.0) -> Array:
    if rng is None:
        return (logits > 0).astype(np.int8)
    probability = 0.5 + 0.5 * np.tanh(0.5 * _at(temperature, logits))
    ones: Array = rng.random(logits.shape) < probability
    return ones.astype(np.int8)


class _Continuous:
    """Base of the distributions over boxes."""

    def __init__(self, head: HeadDescription) -> None:
        self._shape = tuple(head["shape"])
        self._dtype = np.dtype(head["dtype"])


class _Gaussian(_Continuous):
    def __call__(self, logits: Array, rng: np.random.Generator | None, temperature: float = 1.0) -> Array:
        n_components = logits.shape[-1] // 2
        actions = logits[..., :n_components]
        if rng is not None:
            std = np.exp(np.clip(logits[..., n_components:], MIN_LOG_STD, MAX_LOG_STD))
            if temperature != 1.0:
                std *= math.sqrt(temperature)
            actions = actions + std * rng.standard_normal(actions.shape, dtype=np.float32)
        return actions.reshape(len(logits), *self._shape).astype(self._dtype)  # a copy: logits are a reused buffer


class _Bounded(_Continuous):
    """Distributions whose actions lie within the bounds of their box."""

    def __init__(self, head: HeadDescription) -> None:
        super().__init__(head)
        self._low, self._high = np.asarray(head["low"], self._dtype), np.asarray(head["high"], self._dtype)
        self._start = self._low.astype(np.float32)
        self._width = self._high.astype(np.float32) - self._start
        self._half_width = np.float32(0.5) * self._width

    def _inside(self, values: Array) -> Array:
        actions: Array = values.astype(self._dtype, copy=False)
        np.minimum(actions, self._high, out=actions)  # rounding can lead outside
        np.maximum(actions, self._low, out=actions)
        return actions


class _SquashedGaussian(_Bounded):
    def __call__(self, logits: Array, rng: np.random.Generator | None, temperature: float = 1.0) -> Array:
        n_components = logits.shape[-1] // 2
        unsquashed = logits[..., :n_components]
        if rng is not None:
            log_std = np.minimum(logits[..., n_components:], MAX_LOG_STD_BEFORE_SQUASHING)
            std = np.exp(np.maximum(log_std, MIN_LOG_STD, out=log_std), out=log_std)
            if temperature != 1.0:
                std *= math.sqrt(temperature)
            std *= rng.standard_normal(std.shape, dtype=np.float32)
            unsquashed = np.add(std, unsquashed, out=std)
        squashed = np.tanh(unsquashed).reshape(len(logits), *self._shape)
        squashed += 1.0
        squashed *= self._half_width
        squashed += self._start
        return self._inside(squashed)


class _Beta(_Bounded):
    def __call__(self, logits: Array, rng: np.random.Generator | None, temperature: float = 1.0) -> Array:
        n_components = logits.shape[-1] // 2
        softplus = np.logaddexp(logits, np.float32(0.0))
        if temperature != 1.0:
            softplus /= temperature
        concentrations = np.minimum(softplus + np.float32(1.0), np.float32(MAX_CONCENTRATION))
        upper, lower = concentrations[..., :n_components], concentrations[..., n_components:]
        if rng is not None:
            upper, lower = rng.standard_gamma(upper), rng.standard_gamma(lower)
        position = upper / (upper + lower)
        if rng is not None:
            position = np.clip(position, _EPS, 1.0 - _EPS)
        scaled: Array = self._start + position.reshape(len(logits), *self._shape).astype(np.float32) * self._width
        return self._inside(scaled)


# By name of the distribution.
_SAMPLERS: Mapping[str, Callable[[HeadDescription], Sampler]] = {
    "categorical": _Categorical,
    "multi_categorical": _MultiCategorical,
    "bernoulli": lambda _: _bernoulli,
    "gaussian": _Gaussian,
    "squashed_gaussian": _SquashedGaussian,
    "beta": _Beta,
}


def check_logits(logits: Array, sizes: Sequence[int], head: str, where: str) -> None:
    """Refuse logits that cannot be sampled from.

    :param logits: `[batch, ...]`.
    :param sizes: Number of logits of each categorical choice; empty for other distributions.
    :param head: Name of the action head.
    :param where: Of the network that gave them, for messages.
    :raises NonFiniteError: One is NaN or infinite; minus infinity masks a choice.
    :raises EnvironmentContractError: All choices of a row are masked.
    """
    if np.vdot(logits, logits) < _UNSUSPICIOUS:  # for every batch: one product instead of several extremes
        return
    if len(sizes) == 1:
        largest = np.maximum.reduce(logits, -1)  # NaN if one of the row is
        least = most = largest.flat[0]
        if largest.size > 1:
            least, most = largest.min(), largest.max()
        if least > _MASKED and most < np.inf:
            return
    broken = np.isnan(logits) | (np.isinf(logits) if not sizes else logits == np.inf)
    if broken.any():
        row = int(np.argwhere(broken)[0][0])
        error: MazeError = NonFiniteError(
            f"{where}: the logits of action head `{head}` are not finite in row {row} of {len(logits)}: {logits[row]}. "
            "Check that the observation and the weights are finite."
        )
        error.row = row
        raise error
    start = 0
    for size in sizes if len(sizes) != 1 else logits.shape[-1:]:  # as many candidates as there are
        masked = logits[..., start : start + size].max(-1) <= _MASKED
        start += size
        if masked.any():
            row = int(np.argwhere(masked)[0][0])
            error = EnvironmentContractError(
                f"{where}: action head `{head}` has no valid action left in row {row} of {len(logits)}. The action "
                "mask must allow at least one action; check the mask in this head's observation."
            )
            error.row = row
            raise error


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

    :param head: The distribution.
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

    :param head: A distribution of discrete choices.
    :param logits: `[batch, ...]`; masked ones are the smallest finite number or minus infinity.
    """
    if head["distribution"] == "bernoulli":
        return np.zeros_like(logits)
    return np.where(logits > np.finfo(logits.dtype).min, np.zeros_like(logits), logits)


def most_probable(factors: Sequence[Array], n_best: int | None) -> list[tuple[tuple[int, ...], float]]:
    """Return the most probable combinations of independent choices, best first, with their probabilities.

    The k best combinations are made of the k best choices of each factor.

    :param factors: Probabilities `[n_choices]` of each.
    :param n_best: Maximum number of actions; `None`: all.
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
    :param n_best: Maximum number of actions; `None`: all.
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
