"""Statistics, hyperparameters and results for TensorBoard."""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats import LogStats, LogStatsKey, LogStatsWriter, StatsContext
from maze.core.log_stats.reducer_functions import histogram_range
from maze.core.log_stats.stats_format import Figures, name_parts, sample_values, scalar_value, statistic_name

ENV_STEPS = "env_steps"
X_AXES = (ENV_STEPS, "epochs")
_N_BINS = 64
_BUFFER_SIZE = 1 << 20
_file_numbers = count()
SECTIONS = ("algorithm", "env", "model", "runner", "seeding", "wrappers")
"""Sections of a configuration that hold hyperparameters."""
LEFT_OUT = ("state_dict_dump_file", "spaces_config_dump_file", "dump_interval", "statistics_dump", "verbose")
RESULTS = {"best": "Results/best_reward", "final": "Results/final_reward"}
MAX_LENGTH = 80
"""Longest text; longer ones are truncated."""


class LogStatsWriterTensorboard(LogStatsWriter):
    """Write numbers as scalars, distributions as histograms and `define_plot` figures as images (`<tag>/figure`).

    Tags are `<prefix>_<Interface>/<event>/<statistic>`, so that TensorBoard shows a section per prefix and interface,
    `train_BaseEnvEvents` for example. The calling thread writes, so that a full disk raises an `OSError`
    there; `SummaryWriter` of torch writes in another thread and imports torch, which rollouts may not need.

    :param log_dir: Directory of the event file, which is created with the first statistics.
    :param tensorboard_render_figure: Whether to draw figures, which is slow.
    :param x_axis: `env_steps`: environment steps of the training run, if they are counted; `epochs`: log steps.
    :raises ConfigError: There is no such axis.
    """

    def __init__(self, log_dir: str | Path, tensorboard_render_figure: bool, x_axis: str = ENV_STEPS) -> None:
        if x_axis not in X_AXES:
            raise ConfigError(f"x_axis: expected {' or '.join(X_AXES)}, found {x_axis!r}.")
        self.log_dir = str(log_dir)
        self.tensorboard_render_figure = tensorboard_render_figure
        self.x_axis = x_axis
        self.figures = Figures()
        self._records: Any = None
        self._is_training_run = False
        self._rewards = _Rewards()
        self._step = 0

    def begin(self, hyperparameters: Mapping[str, bool | float | str], texts: Mapping[str, str]) -> None:
        """Begin a run.

        Results are the latest and the best mean reward. TensorBoard derives the columns of the HPARAMS tab from all
        runs below its `logdir`; a run that declared columns would hide those of other runs.

        :param hyperparameters: Names and values of the HPARAMS tab; none: the run has no row there, and no results.
        :param texts: Texts of the TEXT tab, in Markdown, by name.
        """
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.summary_v2 import text_pb

        if hyperparameters:
            self._is_training_run = True
            # without a group, each run has a row of its own
            self.add_summary(hparams_pb(dict(hyperparameters), trial_id=""), 0)
        for tag, text in texts.items():
            self.add_summary(text_pb(f"{tag}/text_summary", text), 0)
        self.on_log_step_increment()

    @override(LogStatsWriter)
    def write(self, path: str | None, step: int, stats: LogStats) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = []
        self._step = step
        for key, value in stats.items():
            tag = statistic_name(key, path, "_")
            samples = sample_values(value)
            number = scalar_value(value)
            if number is not None:
                values.append(Summary.Value(tag=tag, simple_value=number))
                self._rewards.add(path, key, number)
            elif samples is not None and (histogram := _histogram(samples)) is not None:
                values.append(Summary.Value(tag=tag, histo=histogram))
            for picture in self.figures.of(path, step, key, value) if self.tensorboard_render_figure else ():
                width, height = struct.unpack(">II", picture.png[16:24])  # of the header of a PNG file
                image = Summary.Image(colorspace=4, encoded_image_string=picture.png, width=width, height=height)
                values.append(Summary.Value(tag=f"{tag}/{picture.name}", image=image))
        if values:
            self.add_summary(Summary(value=values), self.position(step))

    def position(self, step: int) -> int:
        """Return the position of a log step on the x axis.

        :param step: Its number.
        """
        n_env_steps = StatsContext.active().n_env_steps if self.x_axis == ENV_STEPS else None
        return step if n_env_steps is None else n_env_steps

    def add_summary(self, summary: Any, step: int) -> None:
        """Append a summary to the event file.

        :param summary: A `tensorboard.compat.proto.summary_pb2.Summary`.
        :param step: Position on the x axis.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        now = time.time()
        if self._records is None:
            directory = Path(self.log_dir)
            directory.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}"
            self._records = RecordWriter((directory / name).open("xb", buffering=_BUFFER_SIZE))
            self._records.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        self._records.write(Event(wall_time=now, step=step, summary=summary).SerializeToString())

    @override(LogStatsWriter)
    def on_log_step_increment(self) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        results = self._rewards.of_step()
        if self._is_training_run and results:
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in results.items()]
            self.add_summary(Summary(value=values), self.position(self._step))
        if self._records is not None:
            self._records.flush()

    @override(LogStatsWriter)
    def close(self) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        if self._is_training_run:
            self._is_training_run = False
            context = StatsContext.active()
            has_failed = context.error is not None or context.is_disabled(self)
            status = api_pb2.STATUS_FAILURE if has_failed else api_pb2.STATUS_SUCCESS
            info = plugin_data_pb2.HParamsPluginData(session_end_info=plugin_data_pb2.SessionEndInfo(status=status))
            plugin = metadata.create_summary_metadata(info)
            end = Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=plugin, tensor=metadata.NULL_TENSOR)
            self.add_summary(Summary(value=[end]), 0)
        records, self._records = self._records, None
        if records is not None:
            records.close()


def _histogram(samples: np.ndarray[Any, Any]) -> Any:
    from tensorboard.compat.proto.histogram_pb2 import HistogramProto

    if samples.dtype.kind not in "biuf":
        return None
    samples = samples.astype(np.float64)
    samples = samples[np.isfinite(samples)]
    if not len(samples):
        return None
    counts, edges = np.histogram(samples, bins=_N_BINS, range=histogram_range(samples, _N_BINS))
    return HistogramProto(
        min=samples.min(),
        max=samples.max(),
        num=len(samples),
        sum=samples.sum(),
        sum_squares=float(samples @ samples),
        bucket_limit=edges[1:].tolist(),
        bucket=counts.tolist(),
    )


class _Rewards:
    """The mean rewards of a run: those of evaluations or, in a run without evaluation, of the training episodes."""

    def __init__(self) -> None:
        self._of_step: dict[str, float] = {}
        self._best = -math.inf
        self._has_evaluations = False

    def add(self, path: str | None, key: LogStatsKey, number: float) -> None:
        """Add a statistic, which is ignored unless it is a finite mean reward."""
        is_reward = key.output_name == "mean" and name_parts(key)[:2] == ("BaseEnvEvents", "reward")
        if is_reward and math.isfinite(number):
            self._of_step[path or ""] = number

    def of_step(self) -> dict[str, float]:
        """Return the reward of the log step and the best one so far by their tags, and begin another step."""
        reward = self._of_step.get("eval")
        if reward is not None and not self._has_evaluations:
            self._has_evaluations, self._best = True, -math.inf
        if reward is None and not self._has_evaluations:
            reward = self._of_step.get("train")
        self._of_step.clear()
        if reward is None:
            return {}
        self._best = max(self._best, reward)
        return {RESULTS["final"]: reward, RESULTS["best"]: self._best}


def flat_hyperparameters(config: Mapping[str, Any]) -> dict[str, bool | float | str]:
    """Return the values of a training configuration by their paths, in a readable form.

    Classes are named without their modules, short lists as text; empty values and names of files are left out.

    :param config: Plain dictionaries, lists and values; other objects are named by their class.
    """
    sections = {name: config[name] for name in SECTIONS if config.get(name)}
    return dict(_flat(sections, ""))


def _flat(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, bool | float | str]]:
    for key, value in node.items():
        path = f"{prefix}.{_class_name(str(key))}" if prefix else str(key)
        if key in LEFT_OUT or value is None or value == "":
            continue
        if key == "_target_":
            yield prefix, _class_name(str(value))
        elif isinstance(value, Mapping):
            yield from _flat(value, path)
        elif isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(v, Mapping) for v in value):
            yield from _flat({str(index): entry for index, entry in enumerate(value)}, path)
        else:
            yield path, _readable(value)


def _readable(value: Any) -> bool | float | str:
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        text = _class_name(value)
    elif isinstance(value, Sequence):
        text = f"[{', '.join(str(_readable(entry)) for entry in value)}]"
    else:
        text = "-" if value is None else type(value).__name__
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 3]}..."


def _class_name(text: str) -> str:
    """Return the last part of a class path; other texts unchanged."""
    *modules, name = text.split(".")
    is_path = bool(modules) and all(part.isidentifier() for part in (*modules, name)) and name[:1].isalpha()
    return name if is_path else text
