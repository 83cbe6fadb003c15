"""Counters and histograms in the text format that Prometheus reads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

Labels = tuple[tuple[str, str], ...]
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Histogram:
    """How often a value fell into which range.

    :param bounds: Upper bounds, increasing; values above the last one count as well.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Exposition:
    """Collects the lines of one answer."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def family(self, name: str, kind: str, meaning: str, values: Mapping[Labels, float]) -> None:
        """Adds a metric.

        :param name: With its unit, and `_total` where it only grows.
        :param kind: `counter` or `gauge`.
        :param meaning: One sentence.
        :param values: By labels.
        """
        self._head(name, kind, meaning)
        self._lines += [f"{name}{_labels(labels)} {value:.10g}" for labels, value in values.items()]

    def histograms(self, name: str, meaning: str, histograms: Mapping[Labels, Histogram]) -> None:
        """Adds histograms.

        :param name: With its unit.
        :param meaning: One sentence.
        :param histograms: By labels.
        """
        self._head(name, "histogram", meaning)
        for labels, histogram in histograms.items():
            count = 0
            for bound, n in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
                count += n
                shown = "+Inf" if bound == float("inf") else f"{bound:g}"
                self._lines.append(f"{name}_bucket{_labels((*labels, ('le', shown)))} {count}")
            self._lines.append(f"{name}_sum{_labels(labels)} {histogram.total:.10g}")
            self._lines.append(f"{name}_count{_labels(labels)} {count}")

    def text(self) -> str:
        """Everything that was added."""
        return "\n".join([*self._lines, ""])

    def _head(self, name: str, kind: str, meaning: str) -> None:
        self._lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{value.translate(_ESCAPED)}"' for key, value in labels) + "}"
