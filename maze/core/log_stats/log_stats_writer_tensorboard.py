"""Statistics for TensorBoard."""

from __future__ import annotations

import inspect
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from maze.core.annotations import override
from maze.core.log_stats.event_decorators import event_definition
from maze.core.log_stats.event_file import EventFileWriter
from maze.core.log_stats.log_stats import LogStats, LogStatsKey, LogStatsWriter
from maze.core.log_stats.stats_format import event_names, sample_values, scalar_value, statistic_name

_LOGGER = logging.getLogger(__name__)
_N_BINS = 64


class LogStatsWriterTensorboard(LogStatsWriter):
    """Writes numbers as scalars, distributions as histograms and `define_plot` figures as images.

    Tags are `<prefix>_<Interface>/<event>/<statistic>`, so that TensorBoard shows a section per prefix and interface,
    `train_BaseEnvEvents` for example.

    :param log_dir: Directory of the event file.
    :param tensorboard_render_figure: Whether to draw figures, which takes a moment for each.
    """

    def __init__(self, log_dir: str | Path, tensorboard_render_figure: bool) -> None:
        self.log_dir = str(log_dir)
        self.tensorboard_render_figure = tensorboard_render_figure
        self._file = EventFileWriter(log_dir)
        self._failed_plots: set[Any] = set()

    @override(LogStatsWriter)
    def write(self, path: str | None, step: int, stats: LogStats) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = []
        for key, value in stats.items():
            tag = tensorboard_tag(path, key)
            samples = sample_values(value)
            number = scalar_value(value)
            if number is not None:
                values.append(Summary.Value(tag=tag, simple_value=number))
            elif samples is not None and (histogram := _histogram(samples)) is not None:
                values.append(Summary.Value(tag=tag, histo=histogram))
            if self.tensorboard_render_figure:
                values += self._figures(tag, key, value)
        if values:
            self._file.add_summary(Summary(value=values), step)

    def add_summary(self, summary: Any, step: int) -> None:
        """Adds a TensorBoard `Summary` as it is."""
        self._file.add_summary(summary, step)

    def write_text(self, tag: str, text: str, step: int = 0) -> None:
        """Adds a text to the TEXT tab.

        :param tag: Its name.
        :param text: Markdown.
        :param step: Number of the log step.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        plugin = SummaryMetadata.PluginData(plugin_name="text")
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
        value = Summary.Value(tag=f"{tag}/text_summary", metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)
        self._file.add_summary(Summary(value=[value]), step)

    @override(LogStatsWriter)
    def on_log_step_increment(self) -> None:
        self._file.flush()

    @override(LogStatsWriter)
    def close(self) -> None:
        self._file.close()

    def _figures(self, tag: str, key: LogStatsKey, value: Any) -> list[Any]:
        images = []
        for plot in event_definition(key.event).plots:
            if plot.input_name not in (None, key.output_name) or plot in self._failed_plots:
                continue
            try:
                image = _draw(plot.create_figure_function, value, key.group)
            except Exception:
                self._failed_plots.add(plot)
                _LOGGER.warning("The figure %s cannot be drawn; it is left out from now on.", tag, exc_info=True)
                continue
            if image is not None:
                images.append(image(tag))
        return images


def tensorboard_tag(path: str | None, key: LogStatsKey) -> str:
    """The tag under which TensorBoard shows a statistic."""
    interface, method = event_names(key.event)
    section = f"{path}_{interface}" if path else interface
    return "/".join(part for part in (section, method, statistic_name(key)) if part)


def _histogram(samples: np.ndarray[Any, Any]) -> Any:
    from tensorboard.compat.proto.histogram_pb2 import HistogramProto

    if samples.dtype.kind not in "biuf":
        return None
    samples = samples.astype(np.float64)
    samples = samples[np.isfinite(samples)]
    if not len(samples):
        return None
    counts, edges = np.histogram(samples, bins=_N_BINS)
    return HistogramProto(
        min=samples.min(),
        max=samples.max(),
        num=len(samples),
        sum=samples.sum(),
        sum_squares=float(samples @ samples),
        bucket_limit=edges[1:].tolist(),
        bucket=counts.tolist(),
    )


def _draw(create_figure: Callable[..., Any], value: Any, group: Any) -> Callable[[str], Any] | None:
    """The figure as an image, waiting for its tag; `None` if the function draws nothing for this group."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    if isinstance(value, np.ndarray):
        value = [value]  # figure functions get lists, also of a single sample
    parameters = inspect.signature(create_figure).parameters
    takes_groups = "groups" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    figure = create_figure(value, groups=group) if takes_groups else create_figure(value)
    if figure is None:
        return None
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=100)
    width, height = (round(inches * 100) for inches in figure.get_size_inches())
    # Figures drawn with pyplot would otherwise stay in its registry for ever.
    if getattr(figure, "number", None) is not None:
        import matplotlib.pyplot as plt

        plt.close(figure)
    image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=png.getvalue())
    return lambda tag: Summary.Value(tag=tag, image=image)
