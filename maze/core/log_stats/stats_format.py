"""How statistics are named and summarised in logs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from maze.core.log_stats.log_stats import LogStatsKey


def event_names(event: Callable[..., Any]) -> tuple[str, str]:
    """The names of an event's interface and method, as in `("BaseEnvEvents", "reward")`."""
    *outer, method = event.__qualname__.split(".")
    return (outer[-1] if outer else ""), method


def statistic_name(key: LogStatsKey) -> str:
    """Output name and group of a statistic joined by slashes; empty if it has neither."""
    parts = [key.output_name] if key.output_name is not None else []
    return "/".join([*parts, *(str(part) for part in key.group or ())])


def column_name(key: LogStatsKey) -> str:
    """Interface, event, statistic and group joined by slashes, as in `BaseEnvEvents/reward/mean`."""
    return "/".join(filter(None, (*event_names(key.event), statistic_name(key))))


def significant(number: float, digits: int = 4) -> str:
    """The number with so many significant digits, for people: `0.0123`, `12,345`, `2.5e-4`.

    Whole numbers are shown whole, and none loses digits before its point.
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
    """The values of a distribution (a histogram, possibly with its number of categories) as one array.

    `None` where the value is no distribution but a single number or something else.
    """
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], list):
        value = value[0]
    if isinstance(value, np.ndarray) and value.ndim:
        return value.ravel()
    if not isinstance(value, (list, tuple)) or not value:
        return None
    if isinstance(value[0], tuple):  # pairs of a category and the number of categories
        return np.asarray([category for category, _ in value])
    if np.ndim(value[0]) > 0:
        return np.concatenate([np.ravel(part) for part in value])
    return np.asarray(value)


def scalar_value(value: Any) -> float | None:
    """The value as a number; `None` if it is none."""
    if isinstance(value, (bool, int, float, np.number)):
        return float(value)
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "size", None) == 1:
        return float(item())
    return None
