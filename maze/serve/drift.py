"""What observations of the training look like, so that somebody notices when the world has become another.

Each entry of an observation is summed up component by component: small whole numbers by the share of each value, others
by deciles. Of large entries, pictures for instance, four features are taken instead of the components.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maze.serve.bundle_file import BundleError

Array = np.ndarray[Any, Any]

FEATURES = ("mean", "std", "min", "max")
"""What is taken of entries with more than :data:`MOST_COMPONENTS` components."""
MOST_COMPONENTS = 64
MOST_CATEGORIES = 64
_LEVELS = np.arange(1, 10) / 10


def components(array: Any) -> Array:
    """One observation's entry as the numbers that its summary is about.

    :param array: `[*shape]`.
    :return: `[n_components]`, or the features of large entries.
    """
    values = np.asarray(array).reshape(-1)
    if values.size <= MOST_COMPONENTS:
        return values
    return np.array([values.mean(), values.std(), values.min(), values.max()], np.float64)


def summary(samples: Array, is_large: bool) -> dict[str, Any]:
    """Sums up an entry, as JSON.

    :param samples: What :func:`components` gave of each observation, `[n_samples, n_components]`.
    :param is_large: Whether these are features.
    :return: `n_samples`, `n_effective` (of each component, see :func:`effective_samples`), `features` (names, or None),
        and for each of the `components` either `values` with their `shares`, or `min`, `max`, nine inner deciles as
        `edges`, and the `shares` of the ten bins between them. A value that equals an edge belongs to the bin above it.
    """
    parts = [_component(samples[:, index]) for index in range(samples.shape[1])]
    return {
        "n_samples": len(samples),
        "n_effective": [round(effective_samples(places), 1) for _, places in parts],
        "features": list(FEATURES) if is_large else None,
        "components": [component for component, _ in parts],
    }


def checked_summaries(
    entries: Mapping[str, Any], space: Mapping[str, Mapping[str, Any]], where: str
) -> Mapping[str, Any]:
    """Check the summaries of a sub-step that were read from a file.

    :param entries: Summaries by entry.
    :param space: What the environment shows, by entry.
    :param where: The sub-step, for messages.
    :return: The summaries.
    :raises BundleError: They are not those of the entries, or have other parts than :func:`summary` gives.
    """
    for name, found in entries.items():
        place = f"{where}: the drift section's entry `{name}`"
        if name not in space:
            raise BundleError(
                f"{place} is no entry of the observation, which has {list(space)}. Export the policy again."
            )
        n_values = math.prod(space[name]["shape"])
        n_expected = n_values if n_values <= MOST_COMPONENTS else len(FEATURES)
        try:
            if found["features"] not in (None, list(FEATURES)) or len(found["components"]) != n_expected:
                raise ValueError(f"expected {n_expected} components, found {len(found['components'])}")
            counts = np.asarray([found["n_samples"], *found.get("n_effective", [1.0] * n_expected)], np.float64)
            if counts.shape != (n_expected + 1,) or not np.isfinite(counts).all() or not (counts > 0).all():
                raise ValueError(f"expected a number of samples, and {n_expected} of effective samples")
            for part in found["components"]:
                bounds = part["values"] if "values" in part else [part["min"], *part["edges"], part["max"]]
                numbers, shares = np.asarray(bounds, np.float64), np.asarray(part["shares"], np.float64)
                n_shares = len(numbers) - (0 if "values" in part else 1)
                if numbers.ndim != 1 or not len(numbers) or shares.shape != (n_shares,):
                    raise ValueError(f"expected {n_shares} shares, found {shares.size}")
                if not np.isfinite([*numbers, *shares]).all() or (shares < 0).any():
                    raise ValueError("its numbers are not finite, or its shares are negative")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise BundleError(f"{place} cannot be read: {error}. Export the policy again.") from error
    return entries


def _component(values: Array) -> tuple[dict[str, Any], Array]:
    """The summary, and the bins of the values."""
    n_values = len(values)
    if values.dtype.kind in "iub":
        found, places, counts = np.unique(values, return_inverse=True, return_counts=True)
        if len(found) <= MOST_CATEGORIES:
            return {"values": found.astype(np.int64).tolist(), "shares": (counts / n_values).tolist()}, places
    values = values.astype(np.float64)
    edges = np.quantile(values, _LEVELS)
    places = bins(edges, values)
    component = {
        "min": float(values.min()),
        "max": float(values.max()),
        "edges": edges.tolist(),
        "shares": (np.bincount(places, minlength=len(edges) + 1) / n_values).tolist(),
    }
    return component, places


def bins(edges: Any, values: Any) -> Array:
    """The bins that values fall into, from 0 to the number of edges."""
    return np.searchsorted(np.asarray(edges), np.asarray(values), side="right")


def effective_samples(places: Array, n_parts: int = 1, n_batches: Sequence[int] = (4, 10)) -> float:
    """How many independent samples tell as much about the shares of bins as successive ones.

    The number of samples divided by the autocorrelation time: the largest of the bins' indicators, as overlapping batch
    means estimate it (Meketon and Schmeiser 1984). Few long batches overestimate it now and then, and notice what
    differs between episodes only.

    :param places: The bins of samples, in the order of observation, `[n_samples]`.
    :param n_parts: Each part of the samples is estimated by itself, and the smallest autocorrelation time counts, so
        that a shift in one of them is no autocorrelation.
    :param n_batches: Numbers of batches in a part, of which the largest autocorrelation time counts.
    """
    indicators = (np.asarray(places)[:, None] == np.unique(places)).astype(np.float64)
    parts = np.array_split(indicators, min(n_parts, len(places)))
    return len(places) / min(max(_autocorrelation_time(part, n) for n in n_batches) for part in parts)


def _autocorrelation_time(indicators: Array, n_batches: int) -> float:
    """1 where values are independent, or constant."""
    n, length = len(indicators), max(1, len(indicators) // n_batches)
    sums = np.cumsum(np.concatenate([np.zeros((1, indicators.shape[1])), indicators - indicators.mean(0)]), axis=0)
    between = ((sums[length:] - sums[:-length]) ** 2).mean(0) * n / (length * max(1, n - length))
    variance = indicators.var(0)
    return max(1.0, float(np.divide(between, variance, out=np.ones_like(variance), where=variance > 0).max()))


def entry_summaries(samples: Mapping[str, list[Array]], sizes: Mapping[str, int]) -> dict[str, Any]:
    """The summaries of a sub-step's entries by name.

    :param samples: What :func:`components` gave, by entry.
    :param sizes: Numbers of components of the entries themselves.
    """
    return {
        name: summary(np.stack(values), sizes[name] > MOST_COMPONENTS) for name, values in samples.items() if values
    }
