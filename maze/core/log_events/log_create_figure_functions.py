"""Figures of logged distributions, for `define_plot`. Matplotlib is imported when the first one is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from maze.core.log_stats.reducer_functions import categories_of, histogram_range

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BARS = 50
"""Largest number of bars; with more categories a single outline is drawn, which is faster."""


def create_categorical_plot(value: Any, **kwargs: Any) -> Figure:
    """Return a bar plot if the number of categories is known, a histogram otherwise.

    :param value: Pairs of a category and the number of categories, or plain numbers.
    :param kwargs: Not used; may contain the group of the statistic.
    """
    _, n_categories = _categories(value)
    return create_histogram(value) if n_categories is None else create_relative_bar_plot(value)


def create_histogram(value: Any, **kwargs: Any) -> Figure:
    """Return a histogram of numbers.

    :param value: The numbers.
    :param kwargs: Not used; may contain the group of the statistic.
    """
    samples = np.asarray(_categories(value)[0], dtype=np.float64)
    samples = samples[np.isfinite(samples)]
    n_bins = min(50, max(1, len(samples)))
    figure, axes = _figure()
    axes.hist(samples, n_bins, range=histogram_range(samples, n_bins) if len(samples) else None)
    axes.set_ylabel("count")
    return figure


def create_relative_bar_plot(value: Any, **kwargs: Any) -> Figure:
    """Return a bar plot of the share of each category, including categories that do not occur.

    :param value: Pairs of a category and the number of categories.
    :param kwargs: Not used; may contain the group of the statistic.
    """
    samples, n_categories = _categories(value)
    counts = Counter(int(sample) for sample in samples)
    if n_categories is None:
        n_categories = max(counts, default=0) + 1
    first = min(0, min(counts, default=0))
    positions = range(first, max(n_categories, max(counts, default=0) + 1))
    shares = [counts[position] / max(1, len(samples)) for position in positions]
    figure, axes = _figure()
    if len(positions) <= MOST_BARS:
        axes.bar(positions, shares)
        axes.set_xticks(list(positions))
    else:
        axes.stairs(shares, np.arange(first, positions.stop + 1) - 0.5, fill=True)
    axes.set_ylabel("share")
    return figure


def create_violin_distribution(value: Any, **kwargs: Any) -> Figure:
    """Return one violin per component of vectors.

    :param value: The vectors, one array each.
    :param kwargs: Not used; may contain the group of the statistic.
    """
    vectors = [value] if isinstance(value, np.ndarray) and value.ndim == 1 else list(np.atleast_1d(value))
    samples = np.stack([np.ravel(vector) for vector in vectors]).astype(np.float64)
    figure, axes = _figure()
    # A constant component has no density and is drawn as a point.
    axes.violinplot([column if np.ptp(column) > 0 else _spread(column) for column in samples.T], showmeans=True)
    axes.set_xticks(range(1, samples.shape[1] + 1), [str(index) for index in range(samples.shape[1])])
    return figure


def _spread(column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    width = 1e-6 * max(1.0, float(np.abs(column[0])))
    return np.asarray([column[0] - width, column[0], column[0] + width])


def _categories(value: Any) -> tuple[list[Any], int | None]:
    """Return the samples and the number of categories; `None`: it is unknown."""
    if (found := categories_of(value)) is not None:
        return found
    values = list(value) if isinstance(value, Iterable) else [value]
    return [np.asarray(item).item() for item in values], None


def _figure() -> tuple[Figure, Any]:
    # Not through pyplot, which keeps all figures and selects a window system.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0))  # default margins, because a layout engine draws twice
    return figure, figure.subplots()
