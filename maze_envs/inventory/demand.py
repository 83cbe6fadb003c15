"""Distributions of the demand of a period."""

from __future__ import annotations

import numpy as np

from maze.core.errors import ConfigError

_TAIL = 1e-10
"""Probability of demands that are left out."""
_LARGEST_EXPONENT = 600.0


def poisson(mean: float) -> np.ndarray:
    """Return probabilities of 0, 1, 2, ... under a Poisson distribution, cut off where 1e-10 is left.

    :param mean: The mean demand.
    """
    if mean > _LARGEST_EXPONENT:  # here the probability of 0 is no number above 0
        demands = np.arange(int(mean + 10.0 * np.sqrt(mean)))
        logs = demands * np.log(mean) - mean - np.cumsum(np.log(np.maximum(demands, 1)))
        found = np.exp(logs)
        found = found[: int(np.searchsorted(np.cumsum(found), 1.0 - _TAIL)) + 1]
        return np.asarray(found / found.sum())
    probabilities = [np.exp(-mean)]
    while 1.0 - sum(probabilities) > _TAIL:
        probabilities.append(probabilities[-1] * mean / len(probabilities))
    return np.array(probabilities) / sum(probabilities)


def geometric(mean: float) -> np.ndarray:
    """Return probabilities of 0, 1, 2, ... under a geometric distribution, cut off where 1e-10 is left.

    :param mean: The mean demand.
    """
    ratio = mean / (1.0 + mean)
    n_values = int(np.ceil(np.log(_TAIL) / np.log(ratio))) if ratio else 1
    probabilities = (1.0 - ratio) * ratio ** np.arange(n_values)
    return np.asarray(probabilities / probabilities.sum())


def uniform(largest: int) -> np.ndarray:
    """Return probabilities of 0, ..., `largest`, all the same."""
    return np.full(largest + 1, 1.0 / (largest + 1))


def with_surges(probabilities: np.ndarray, probability: float, units: int) -> np.ndarray:
    """Return the distribution of a demand that is larger in rare periods.

    :param probabilities: Distribution in other periods.
    :param probability: Probability of a surge in a period.
    :param units: Units by which a surge increases the demand.
    """
    usual = np.pad(probabilities, (0, units))
    return (1.0 - probability) * usual + probability * np.roll(usual, units)


def distribution(name: str, mean: float) -> np.ndarray:
    """Return a demand distribution by its name.

    :param name: `poisson` or `geometric`.
    :param mean: The mean demand.
    :raises ConfigError: There is none of that name, or the mean is negative or not finite.
    """
    known = {"poisson": poisson, "geometric": geometric}
    if name not in known:
        raise ConfigError(f"env.demand: expected one of {', '.join(known)}, found {name!r}.")
    if not 0.0 <= mean < np.inf:
        raise ConfigError(f"env.mean_demand: expected a finite number of at least 0, found {mean}.")
    return known[name](mean)
