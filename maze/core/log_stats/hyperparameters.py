"""Hyper-parameters and results of a training, for TensorBoard's HPARAMS tab.

A run only states its own values. TensorBoard derives the columns from all runs below its `logdir`, those that differ
first; a run that declared columns itself would hide those of other runs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from maze.core.annotations import override
from maze.core.log_stats.log_stats import LogStats, LogStatsWriter
from maze.core.log_stats.log_stats_writer_tensorboard import LogStatsWriterTensorboard
from maze.core.log_stats.stats_format import event_names, scalar_value

SECTIONS = ("algorithm", "env", "model", "runner", "seeding", "wrappers")
"""Sections of a configuration that hold hyper-parameters."""
LEFT_OUT = ("state_dict_dump_file", "spaces_config_dump_file", "dump_interval", "statistics_dump", "verbose")
RESULTS = {"best": "Results/best_reward", "final": "Results/final_reward"}
MAX_LENGTH = 80
"""Longer texts are cut off."""


class HyperparametersWriter(LogStatsWriter):
    """States the hyper-parameters of a run, and follows its mean reward: the latest one and the best one so far.

    The reward is that of evaluations; of a training without any, that of its own episodes.

    :param tensorboard: Its event file is written to. It has to be registered after this writer, and closed after it.
    :param hyperparameters: Names and values.
    """

    def __init__(
        self, tensorboard: LogStatsWriterTensorboard, hyperparameters: Mapping[str, bool | float | str]
    ) -> None:
        self.hyperparameters = dict(hyperparameters)
        self._tensorboard = tensorboard
        self._rewards: dict[str, float] = {}
        self._best = -math.inf
        self._has_evaluations = False
        self._step = 0
        self._is_started = False

    def start(self) -> None:
        """Writes the hyper-parameters."""
        from tensorboard.plugins.hparams import plugin_data_pb2

        self._is_started = True
        info = plugin_data_pb2.SessionStartInfo()
        for name, value in self.hyperparameters.items():
            if isinstance(value, bool):
                info.hparams[name].bool_value = value
            elif isinstance(value, str):
                info.hparams[name].string_value = value
            else:
                info.hparams[name].number_value = value
        self._write_metadata("session_start_info", plugin_data_pb2.HParamsPluginData(session_start_info=info))

    @override(LogStatsWriter)
    def write(self, path: str | None, step: int, stats: LogStats) -> None:
        self._step = step
        for key, value in stats.items():
            is_reward = key.output_name == "mean" and event_names(key.event) == ("BaseEnvEvents", "reward")
            number = scalar_value(value) if is_reward else None
            if number is not None and math.isfinite(number):
                self._rewards[path or ""] = number

    @override(LogStatsWriter)
    def on_log_step_increment(self) -> None:
        reward = self._rewards.pop("eval", None)
        if reward is not None and not self._has_evaluations:
            self._has_evaluations, self._best = True, -math.inf
        if reward is None and not self._has_evaluations:
            reward = self._rewards.get("train")
        self._rewards.clear()
        if reward is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._best = max(self._best, reward)
        results = {RESULTS["final"]: reward, RESULTS["best"]: self._best}
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in results.items()]
        self._tensorboard.add_summary(Summary(value=values), self._tensorboard.position(self._step))

    @override(LogStatsWriter)
    def close(self) -> None:
        from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

        if not self._is_started:
            return
        self._is_started = False
        # Writers are closed when the run's context is left; by an exception, where the run failed.
        status = api_pb2.STATUS_SUCCESS if sys.exc_info()[0] is None else api_pb2.STATUS_FAILURE
        info = plugin_data_pb2.SessionEndInfo(status=status)
        self._write_metadata("session_end_info", plugin_data_pb2.HParamsPluginData(session_end_info=info))

    def _write_metadata(self, name: str, data: Any) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import metadata

        tag = f"_hparams_/{name}"
        value = Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR)
        self._tensorboard.add_summary(Summary(value=[value]), 0)


def flat_hyperparameters(config: Mapping[str, Any]) -> dict[str, bool | float | str]:
    """The values of a training's configuration under their paths, in a readable form.

    Classes stand without their modules, short lists as text; empty values and names of files are left out.

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
        elif isinstance(value, Sequence) and not isinstance(value, str) and any(map(_is_container, value)):
            yield from _flat({str(index): entry for index, entry in enumerate(value)}, path)
        else:
            yield path, _readable(value)


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping)


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
    """The last part of a class path; other texts as they are."""
    *modules, name = text.split(".")
    is_path = bool(modules) and all(part.isidentifier() for part in (*modules, name)) and name[:1].isalpha()
    return name if is_path else text
