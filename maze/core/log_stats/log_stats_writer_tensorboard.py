"""Statistics for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.log_stats.event_file import EventFileWriter
from maze.core.log_stats.figures import Figures
from maze.core.log_stats.log_stats import LogStats, LogStatsKey, LogStatsWriter, StatsContext
from maze.core.log_stats.stats_format import event_names, sample_values, scalar_value, statistic_name

ENV_STEPS = "env_steps"
X_AXES = (ENV_STEPS, "epochs")
_N_BINS = 64


class LogStatsWriterTensorboard(LogStatsWriter):
    """Writes numbers as scalars, distributions as histograms and `define_plot` figures as images (`<tag>/figure`).

    Tags are `<prefix>_<Interface>/<event>/<statistic>`, so that TensorBoard shows a section per prefix and interface,
    `train_BaseEnvEvents` for example.

    :param log_dir: Directory of the event file.
    :param tensorboard_render_figure: Whether to draw figures, which takes a moment for each.
    :param x_axis: `env_steps`: environment steps of the training, where it takes any; `epochs`: log steps.
    :raises ConfigError: There is no such axis.
    """

    def __init__(self, log_dir: str | Path, tensorboard_render_figure: bool, x_axis: str = ENV_STEPS) -> None:
        if x_axis not in X_AXES:
            raise ConfigError(f"x_axis: expected {' or '.join(X_AXES)}, got {x_axis!r}.")
        self.log_dir = str(log_dir)
        self.tensorboard_render_figure = tensorboard_render_figure
        self.x_axis = x_axis
        self.figures = Figures()
        self._file = EventFileWriter(log_dir)

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
            for picture in self.figures.of(path, step, key, value) if self.tensorboard_render_figure else ():
                size = {"height": picture.height, "width": picture.width}
                image = Summary.Image(colorspace=4, encoded_image_string=picture.png, **size)
                values.append(Summary.Value(tag=f"{tag}/{picture.name}", image=image))
        if values:
            self._file.add_summary(Summary(value=values), self.position(step))

    def position(self, step: int) -> int:
        """Where a log step stands on the x axis.

        :param step: Its number.
        """
        n_env_steps = StatsContext.active().n_env_steps if self.x_axis == ENV_STEPS else None
        return step if n_env_steps is None else n_env_steps

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
