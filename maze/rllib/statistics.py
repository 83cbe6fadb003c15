"""Results of RLlib and statistics of its environments, on the way to Maze's writers."""

from __future__ import annotations

import json
import math
from abc import ABC
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from maze.core.log_stats.event_decorators import define_epoch_stats, define_stats_grouping
from maze.core.log_stats.log_stats import (
    LogStats,
    LogStatsAggregator,
    LogStatsLevel,
    StatsContext,
    get_stats_logger,
)
from maze.core.log_stats.log_stats_writer_tensorboard import LogStatsWriterTensorboard
from maze.core.utils.files import read_json_object, write_whole

_LEFT_OUT = ("config", "hist_stats", "perf", "sampler_results", "connector", "timers")
_BOOKKEEPING = ("num_", "module_", "weights_", "diff_", "last_", "default_optimizer", "gradients_default", "connector")
_SHOWN_OF_SAMPLING = (
    "episode_return_mean",
    "episode_return_max",
    "episode_return_min",
    "episode_len_mean",
    "num_env_steps_sampled_lifetime",
    "num_episodes_lifetime",
)


class RLlibEvents(ABC):
    """What RLlib reports after an iteration."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("name")
    def sampling(self, name: str, value: float) -> None:
        """What the workers have sampled, by RLlib's name; episodes are those of RLlib's smoothing window."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("name")
    def learner(self, name: str, value: float) -> None:
        """What a learner reports, such as losses, by RLlib's name; with the module's where there are several."""

    @define_epoch_stats(np.mean)
    def time_iteration(self, value: float) -> None:
        """Seconds spent on the iteration, without evaluation."""


class TrainingStatistics:
    """Statistics of one training: episodes of the workers and results of RLlib, written once per iteration.

    :param directory: Where RLlib's complete results go; `None`: nowhere.
    """

    def __init__(self, directory: str | Path | None) -> None:
        self.episodes = LogStatsAggregator(LogStatsLevel.EPOCH, get_stats_logger("train"))
        self._results = LogStatsAggregator(LogStatsLevel.EPOCH, get_stats_logger("train"))
        self._events: RLlibEvents = self._results.create_event_topic(RLlibEvents)
        self._writer = None if directory is None else LogStatsWriterTensorboard(directory, False)

    def write(self, result: Mapping[str, Any], episodes: Iterable[LogStats], seconds: float, iteration: int) -> None:
        """Writes the statistics of an iteration.

        :param result: What RLlib's `train()` has returned.
        :param episodes: Statistics of the episodes finished in it.
        :param seconds: How long it took.
        :param iteration: Its number.
        """
        n_episodes = 0
        for stats in episodes:
            self.episodes.receive(stats)
            n_episodes += 1
        if n_episodes:
            self.episodes.reduce()
        for name in _SHOWN_OF_SAMPLING:
            value = result.get("env_runners", {}).get(name)
            if is_number(value):
                self._events.sampling(name=name, value=float(value))
        modules = learner_results(result)
        for module, values in modules.items():
            for name, value in scalars(values):
                if not name.startswith(_BOOKKEEPING):
                    shown = name if len(modules) == 1 else f"{module}/{name}"
                    self._events.learner(name=shown, value=value)
        self._events.time_iteration(value=seconds)
        self._results.reduce()
        if self._writer is not None:
            StatsContext.active().guarded(self._writer, partial(_write_result, self._writer, result, iteration))

    def close(self) -> None:
        """Finishes writing."""
        if self._writer is not None:
            StatsContext.active().guarded(self._writer, self._writer.close)


def _write_result(writer: LogStatsWriterTensorboard, result: Mapping[str, Any], iteration: int) -> None:
    """Write all numbers of a result of RLlib, under its own names."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=f"ray/{tag}", simple_value=value) for tag, value in scalars(result)]
    writer.add_summary(Summary(value=values), iteration)
    writer.on_log_step_increment()


def learner_results(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What the learners report, by module."""
    learners = result.get("learners", {})
    return {
        str(module): values
        for module, values in learners.items()
        if isinstance(values, Mapping) and module != "__all_modules__"
    }


def scalars(result: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """All finite numbers of a nested result, with their paths."""
    for key, value in result.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            if not any(part in str(key) for part in _LEFT_OUT):
                yield from scalars(value, f"{name}/")
        elif is_number(value) and math.isfinite(float(value)):
            yield name, float(value)


def is_number(value: Any) -> bool:
    """Whether it is a single number; arrays without dimensions are."""
    if isinstance(value, bool | np.bool_):
        return False
    return isinstance(value, int | float | np.number) or (isinstance(value, np.ndarray) and value.shape == ())


def value_at(result: Mapping[str, Any], path: str) -> float | None:
    """The number under a path of a result, such as `env_runners/episode_return_mean`; `None`: there is none."""
    found: Any = result
    for part in path.split("/"):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return float(found) if is_number(found) else None


PROGRESS_FILE = "rllib_progress.json"


def write_progress(iteration: int, is_finished: bool, best_score: float, directory: str | Path = ".") -> None:
    """Writes the file.

    :param iteration: Number of iterations done.
    :param is_finished: Whether the training came to its end.
    :param best_score: Score of the best policy; infinite: there is none yet.
    :param directory: Directory of the run.
    """
    content = {
        "iteration": iteration,
        "is_finished": is_finished,
        "best_score": best_score if math.isfinite(best_score) else None,
    }
    text = json.dumps(content, indent=2) + "\n"
    write_whole(Path(directory) / PROGRESS_FILE, text)


def read_progress(directory: str | Path) -> Mapping[str, Any] | None:
    """What :func:`write_progress` wrote; `None`: the file is missing or damaged."""
    return read_json_object(Path(directory) / PROGRESS_FILE) or None
