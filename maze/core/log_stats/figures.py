"""Pictures of statistics, as events define them with `define_plot`."""

from __future__ import annotations

import inspect
import io
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from maze.core.log_stats.event_decorators import PlotDefinition, event_definition
from maze.core.log_stats.log_stats import LogStatsKey
from maze.core.log_stats.stats_format import column_name

_LOGGER = logging.getLogger(__name__)
_DPI = 100


class Picture(NamedTuple):
    """A figure, drawn.

    :param name: What is added to the name of its statistic; pictures are never called like the statistic itself, which
        may be shown as a histogram under that name.
    :param png: The file.
    :param width: In pixels.
    :param height: In pixels.
    """

    name: str
    png: bytes
    width: int
    height: int


class Figures:
    """Draws figures once for all writers; one that cannot be drawn is one warning and is left out from then on."""

    def __init__(self) -> None:
        self._failed: set[PlotDefinition] = set()
        self._drawn: dict[LogStatsKey, list[Picture]] = {}
        self._drawn_of: tuple[str | None, int] | None = None

    def of(self, path: str | None, step: int, key: LogStatsKey, value: Any) -> list[Picture]:
        """The pictures of a statistic.

        :param path: Its prefix.
        :param step: Number of its log step.
        :param key: Which statistic it is.
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
                    "The figure of %s cannot be drawn; it is left out from now on.", column_name(key), exc_info=True
                )
                continue
            if drawn is not None:
                number += 1
                yield Picture("figure" if number == 1 else f"figure_{number}", *drawn)


def _drawn(create_figure: Callable[..., Any], value: Any, group: Any) -> tuple[bytes, int, int] | None:
    """The figure as a file, its width and height; `None` if the function draws nothing for this group."""
    if isinstance(value, np.ndarray):
        value = [value]  # figure functions get lists, also of a single sample
    parameters = inspect.signature(create_figure).parameters
    takes_groups = "groups" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    figure = create_figure(value, groups=group) if takes_groups else create_figure(value)
    if figure is None:
        return None
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=_DPI)
    width, height = (round(inches * _DPI) for inches in figure.get_size_inches())
    # Figures drawn with pyplot would otherwise stay in its registry for ever.
    if getattr(figure, "number", None) is not None:
        import matplotlib.pyplot as plt

        plt.close(figure)
    return png.getvalue(), width, height
