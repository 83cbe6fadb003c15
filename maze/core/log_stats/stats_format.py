"""Formats of statistics for writers: names, numbers, samples of distributions, figures."""

from __future__ import annotations

import inspect
import io
import logging
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from maze.core.log_stats.event_decorators import PlotDefinition, event_definition
from maze.core.log_stats.log_stats import LogStatsKey
from maze.core.log_stats.reducer_functions import categories_of

QUANTILES = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
SHARE = "share_"
MOST_CATEGORIES, MOST_COMPONENTS, MOST_SAMPLES = 32, 16, 10_000
_LOGGER = logging.getLogger(__name__)
_DPI = 100


def name_parts(key: LogStatsKey) -> tuple[str, str, str]:
    """Return interface, event and statistic, as in `("BaseEnvEvents", "kpi", "mean/usage")`.

    The statistic is its output name and its group; empty if it has neither.
    """
    *outer, method = key.event.__qualname__.split(".")
    parts = [key.output_name] if key.output_name is not None else []
    return (outer[-1] if outer else ""), method, "/".join([*parts, *map(str, key.group or ())])


def statistic_name(key: LogStatsKey, path: str | None = None, joint: str = "/") -> str:
    """Return the name of a statistic in tables, trackers and TensorBoard, as in `train/BaseEnvEvents/reward/mean`.

    :param key: The statistic.
    :param path: Its prefix; `None` or empty: without prefix, as the columns of `progress.csv` are named.
    :param joint: Text between prefix and interface. TensorBoard, which makes a section of the text before the first
        slash, shows `train_BaseEnvEvents/reward/mean`.
    """
    name = "/".join(filter(None, name_parts(key)))
    return f"{path}{joint}{name}" if path else name


def significant(number: float, digits: int = 4) -> str:
    """Return a number with significant digits: `0.0123`, `12,345`, `2.5e-4`.

    Digits before the decimal point are never rounded.

    :param number: The number. Whole numbers below 1e9 have all digits; NaN and infinity are texts.
    :param digits: Largest number of significant digits of other numbers, at least 1.
    """
    if not math.isfinite(number):
        return str(number)
    size = abs(number)
    if number == int(number) and size < 1e9:
        return f"{int(number):,}"
    if not 1e-3 <= size < 1e9:
        mantissa, exponent = f"{number:.{digits - 1}e}".split("e")
        return f"{_without_zeros(mantissa)}e{int(exponent)}"
    return _without_zeros(f"{number:,.{max(0, digits - 1 - math.floor(math.log10(size)))}f}")


def _without_zeros(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def sample_values(value: Any) -> np.ndarray[Any, Any] | None:
    """Return the values of a distribution as one array `[n_values]`; `None`: the value is not a distribution.

    :param value: An array or a non-empty list of values, which are flattened; or a list of categories together with
        their number.
    """
    value, _ = categories_of(value) or (value, None)
    if isinstance(value, np.ndarray) and value.ndim:
        return value.ravel()
    if not isinstance(value, (list, tuple)) or not value:
        return None
    return np.concatenate([np.ravel(part) for part in value]) if np.ndim(value[0]) > 0 else np.asarray(value)


def scalar_value(value: Any) -> float | None:
    """Return the value as a number; `None`: it is not a number.

    :param value: A number, a truth value, or an array or tensor with one element.
    """
    if isinstance(value, (bool, int, float, np.number)):
        return float(value)
    item = getattr(value, "item", None)
    return float(item()) if item is not None and getattr(value, "size", None) == 1 else None


def columns_of(name: str, value: Any) -> dict[str, float]:
    """Return the columns of a statistic; empty if it is neither a number nor a distribution of numbers.

    :param name: Name of the statistic.
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
        _, n_categories = categories_of(value) or (None, 0)
        counts = np.bincount(samples.astype(np.int64), minlength=n_categories if n_categories <= MOST_CATEGORIES else 0)
        return {f"{name}/{SHARE}{index}": float(share) for index, share in enumerate(counts / samples.size)}
    vectors = _vectors(value)
    parts = {name: samples} if vectors is None else {f"{name}/{index}": part for index, part in enumerate(vectors.T)}
    columns: dict[str, float] = {}
    for part_name, part in parts.items():
        if (finite := part[np.isfinite(part)]).size:
            values = np.quantile(finite, list(QUANTILES.values())).tolist()
            columns |= {f"{part_name}/{label}": number for label, number in zip(QUANTILES, values, strict=True)}
    return columns


def _vectors(value: Any) -> np.ndarray[Any, Any] | None:
    """Return samples `[n_samples, n_components]`; `None`: they are not short vectors of the same length."""
    if not isinstance(value, (list, tuple)) or np.ndim(value[0]) != 1:
        return None
    kept = value[:: -(-len(value) // MOST_SAMPLES)]
    n_components = len(kept[0])
    if not 1 <= n_components <= MOST_COMPONENTS or any(np.shape(sample) != (n_components,) for sample in kept):
        return None
    return np.asarray(kept, np.float64)


class Picture(NamedTuple):
    """A rendered figure.

    :param name: Suffix of the name of its statistic, which may be a histogram with that name.
    :param png: PNG file.
    """

    name: str
    png: bytes


class Figures:
    """Draw figures once for all writers; after an error a figure is disabled with one warning."""

    def __init__(self) -> None:
        self._failed: set[PlotDefinition] = set()
        self._drawn: dict[LogStatsKey, list[Picture]] = {}
        self._drawn_of: tuple[str | None, int] | None = None

    def of(self, path: str | None, step: int, key: LogStatsKey, value: Any) -> list[Picture]:
        """Return the pictures of a statistic.

        :param path: Its prefix.
        :param step: Number of its log step.
        :param key: The statistic.
        :param value: Its value.
        """
        if not event_definition(key.event).plots:
            return []
        if self._drawn_of != (path, step):
            self._drawn_of, self._drawn = (path, step), {}
        if key not in self._drawn:
            self._drawn[key] = list(self._draw(key, value))
        return self._drawn[key]

    def _draw(self, key: LogStatsKey, value: Any) -> Iterator[Picture]:
        number = 0
        for plot in event_definition(key.event).plots:
            if plot.input_name not in (None, key.output_name) or plot in self._failed:
                continue
            try:
                drawn = _drawn(plot.create_figure_function, value, key.group)
            except Exception:
                self._failed.add(plot)
                _LOGGER.warning(
                    "The figure of %s cannot be drawn; it is disabled for this run.", statistic_name(key), exc_info=True
                )
                continue
            if drawn is not None:
                number += 1
                yield Picture("figure" if number == 1 else f"figure_{number}", drawn)


def _drawn(create_figure: Callable[..., Any], value: Any, group: Any) -> bytes | None:
    """Return the figure as PNG; `None`: the function draws nothing for this group."""
    if isinstance(value, np.ndarray):
        value = [value]  # figure functions require lists
    parameters = inspect.signature(create_figure).parameters
    takes_groups = "groups" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    figure = create_figure(value, groups=group) if takes_groups else create_figure(value)
    if figure is None:
        return None
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=_DPI)
    if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
        pyplot.close(figure)  # it keeps figures until they are closed
    return png.getvalue()
