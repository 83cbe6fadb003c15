"""What observations of the training look like, so that somebody notices when the world has become another.

Each entry of an observation is summed up component by component: small whole numbers by the share of each value, others
by deciles. Of large entries, pictures for instance, four features are taken instead of the components.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    :return: `n_samples`, `features` (names, or None), and for each of the `components` either `values` with their
        `shares`, or `min`, `max`, nine inner deciles as `edges`, and the `shares` of the ten bins between them. A value
        that equals an edge belongs to the bin above it.
    """
    return {
        "n_samples": len(samples),
        "features": list(FEATURES) if is_large else None,
        "components": [_component(samples[:, index]) for index in range(samples.shape[1])],
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


def _component(values: Array) -> dict[str, Any]:
    n_values = len(values)
    if values.dtype.kind in "iub":
        found, counts = np.unique(values, return_counts=True)
        if len(found) <= MOST_CATEGORIES:
            return {"values": found.astype(np.int64).tolist(), "shares": (counts / n_values).tolist()}
    values = values.astype(np.float64)
    edges = np.quantile(values, _LEVELS)
    return {
        "min": float(values.min()),
        "max": float(values.max()),
        "edges": edges.tolist(),
        "shares": (np.bincount(bins(edges, values), minlength=len(edges) + 1) / n_values).tolist(),
    }


def bins(edges: Any, values: Any) -> Array:
    """The bins that values fall into, from 0 to the number of edges."""
    return np.searchsorted(np.asarray(edges), np.asarray(values), side="right")


def entry_summaries(samples: Mapping[str, list[Array]], sizes: Mapping[str, int]) -> dict[str, Any]:
    """The summaries of a sub-step's entries by name.

    :param samples: What :func:`components` gave, by entry.
    :param sizes: Numbers of components of the entries themselves.
    """
    return {
        name: summary(np.stack(values), sizes[name] > MOST_COMPONENTS) for name, values in samples.items() if values
    }
