"""What observations of the training look like, so that somebody notices when the world has become another.

Each entry of an observation is summed up component by component: small whole numbers by the share of each value, others
by deciles. Of large entries, pictures for instance, four features are taken instead of the components.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

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
