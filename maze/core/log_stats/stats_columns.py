"""Statistics as columns of numbers, for tables and trackers."""

from __future__ import annotations

from typing import Any

import numpy as np

from maze.core.log_stats.stats_format import sample_values, scalar_value

QUANTILES = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
SHARE = "share_"
MOST_CATEGORIES, MOST_COMPONENTS, MOST_SAMPLES = 32, 16, 10_000


def columns_of(name: str, value: Any) -> dict[str, float]:
    """The columns that a statistic makes; none where it is neither a number nor a distribution of numbers.

    :param name: Of the statistic.
    :param value: A number, the samples of a distribution, or pairs of a category and the number of categories.
    """
    number = scalar_value(value)
    if number is not None:
        return {name: number}
    samples = sample_values(value)
    if samples is None or samples.dtype.kind not in "biuf" or not samples.size:
        return {}
    samples = samples[:: -(-samples.size // MOST_SAMPLES)] if samples.dtype.kind == "f" else samples
    if samples.dtype.kind != "f" and samples.min() >= 0 and samples.max() < MOST_CATEGORIES:
        counts = np.bincount(samples.astype(np.int64), minlength=_n_categories(value))
        return {f"{name}/{SHARE}{index}": float(share) for index, share in enumerate(counts / samples.size)}
    vectors = _vectors(value)
    if vectors is None:
        return _quantiles(name, samples)
    columns: dict[str, float] = {}
    for component in range(vectors.shape[1]):
        columns.update(_quantiles(f"{name}/{component}", vectors[:, component]))
    return columns


def _n_categories(value: Any) -> int:
    """How many categories there are, where the value says so."""
    n_categories: Any = 0
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], list):
        n_categories = value[1]
    elif isinstance(value, (list, tuple)) and isinstance(value[0], tuple) and len(value[0]) == 2:
        n_categories = value[0][1]
    is_number = isinstance(n_categories, (int, np.integer)) and 0 <= n_categories <= MOST_CATEGORIES
    return int(n_categories) if is_number else 0


def _vectors(value: Any) -> np.ndarray[Any, Any] | None:
    """Samples `[n_samples, n_components]`, where they are short vectors of the same length."""
    if not isinstance(value, (list, tuple)) or np.ndim(value[0]) != 1:
        return None
    kept = value[:: -(-len(value) // MOST_SAMPLES)]
    n_components = len(kept[0])
    if not 1 <= n_components <= MOST_COMPONENTS or any(np.shape(sample) != (n_components,) for sample in kept):
        return None
    return np.asarray(kept, np.float64)


def _quantiles(name: str, samples: np.ndarray[Any, Any]) -> dict[str, float]:
    finite = samples[np.isfinite(samples)] if samples.dtype.kind == "f" else samples
    if not finite.size:
        return {}
    values = np.quantile(finite, list(QUANTILES.values()))
    return {f"{name}/{label}": float(value) for label, value in zip(QUANTILES, values, strict=True)}
