"""Console writer of statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from maze.console.streams import print_text
from maze.core.annotations import override
from maze.core.log_stats.log_stats import LogStats, LogStatsKey, LogStatsWriter
from maze.core.log_stats.stats_format import name_parts, sample_values, scalar_value

_COLUMN = 22
_LONGEST_NAME = 20
_VALUE = 20
_STEP = 5


class LogStatsWriterConsole(LogStatsWriter):
    """Print one row per statistic: log step, path (prefix, interface, event, statistic) and value.

    The header is printed once for each log step and prefix.

    :param output: Receives the text instead of the console.
    """

    def __init__(self, output: Callable[[str], None] | None = None) -> None:
        self.output = output
        self._block: tuple[str | None, int] | None = None

    @override(LogStatsWriter)
    def write(self, path: str | None, step: int, stats: LogStats) -> None:
        if not stats:
            return
        lines = []
        if self._block != (path, step):
            self._block = (path, step)
            lines += [
                f"{'step':>{_STEP}}|{'path':<{4 * _COLUMN}}|{'value':>{_VALUE}}",
                f"{'=' * _STEP}|{'=' * 4 * _COLUMN}|{'=' * _VALUE}",
            ]
        lines += [f"{step:>{_STEP}}|{_path(path, key)}|{format_value(value):>{_VALUE}}" for key, value in stats.items()]
        (self.output or print_text)("\n".join(lines))


def format_value(value: Any) -> str:
    """Return numbers with three decimals, distributions by length and mean, text unchanged."""
    samples = sample_values(value)
    if samples is not None:
        is_numeric = samples.dtype.kind in "biuf"
        return f"[len:{len(samples)}, μ:{samples.mean():.1f}]" if is_numeric else f"[len:{len(samples)}]"
    number = scalar_value(value)
    return str(value) if number is None else f"{number:.3f}"


def _path(path: str | None, key: LogStatsKey) -> str:
    interface, method, name = name_parts(key)
    columns = [_cut(path or ""), _cut(interface), _cut(method), _cut(name) if name else "·" * _COLUMN]
    return "".join(f"{column:<{_COLUMN}}" for column in columns)


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[:_LONGEST_NAME] + ".."
