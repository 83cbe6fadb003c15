"""Statistics of RLlib's results and environments for Maze's writers, and stop conditions."""

from __future__ import annotations

import json
import math
from abc import ABC
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from maze.core.errors import ConfigError, did_you_mean
from maze.core.log_stats.event_decorators import define_epoch_stats, define_stats_grouping
from maze.core.log_stats.log_stats import (
    LogStats,
    LogStatsAggregator,
    LogStatsLevel,
    StatsContext,
    get_stats_logger,
)
from maze.core.log_stats.log_stats_writer_tensorboard import LogStatsWriterTensorboard
from maze.core.utils.checked_config import CheckedConfig
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
    """Results of an iteration of RLlib."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("name")
    def sampling(self, name: str, value: float) -> None:
        """A sampling statistic by RLlib's name; episodes are those of RLlib's smoothing window."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("name")
    def learner(self, name: str, value: float) -> None:
        """A learner statistic such as a loss, by RLlib's name; with the name of the module if there are several."""

    @define_epoch_stats(np.mean)
    def time_iteration(self, value: float) -> None:
        """Duration of the iteration in seconds, without evaluation."""


class TrainingStatistics:
    """Statistics of a run: episodes of the workers and results of RLlib, written once per iteration.

    :param directory: Directory for RLlib's complete results; `None`: they are not written.
    """

    def __init__(self, directory: str | Path | None) -> None:
        self.episodes = LogStatsAggregator(LogStatsLevel.EPOCH, get_stats_logger("train"))
        self._results = LogStatsAggregator(LogStatsLevel.EPOCH, get_stats_logger("train"))
        self._events: RLlibEvents = self._results.create_event_topic(RLlibEvents)
        self._writer = None if directory is None else LogStatsWriterTensorboard(directory, False)

    def write(self, result: Mapping[str, Any], episodes: Iterable[LogStats], seconds: float, iteration: int) -> None:
        """Write the statistics of an iteration.

        :param result: Result of RLlib's `train()`.
        :param episodes: Statistics of the episodes that ended in the iteration.
        :param seconds: Duration in seconds.
        :param iteration: Number of the iteration.
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
        """Close the writer."""
        if self._writer is not None:
            StatsContext.active().guarded(self._writer, self._writer.close)


def _write_result(writer: LogStatsWriterTensorboard, result: Mapping[str, Any], iteration: int) -> None:
    """Write all numbers of a result of RLlib, under its own names."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=f"ray/{tag}", simple_value=value) for tag, value in scalars(result)]
    writer.add_summary(Summary(value=values), iteration)
    writer.on_log_step_increment()


def learner_results(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the results of the learners by module."""
    learners = result.get("learners", {})
    return {
        str(module): values
        for module, values in learners.items()
        if isinstance(values, Mapping) and module != "__all_modules__"
    }


def scalars(result: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield all finite numbers of a nested result with their paths."""
    for key, value in result.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            if not any(part in str(key) for part in _LEFT_OUT):
                yield from scalars(value, f"{name}/")
        elif is_number(value) and math.isfinite(float(value)):
            yield name, float(value)


def is_number(value: Any) -> bool:
    """Return whether a value is a single number, which includes arrays without dimensions."""
    if isinstance(value, bool | np.bool_):
        return False
    return isinstance(value, int | float | np.number) or (isinstance(value, np.ndarray) and value.shape == ())


def value_at(result: Mapping[str, Any], path: str) -> float | None:
    """Return the number at a path of a result, such as `env_runners/episode_return_mean`; `None`: there is none."""
    found: Any = result
    for part in path.split("/"):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return float(found) if is_number(found) else None


PROGRESS_FILE = "rllib_progress.json"


def write_progress(iteration: int, is_finished: bool, best_score: float, directory: str | Path = ".") -> None:
    """Write the progress of a run.

    :param iteration: Number of completed iterations.
    :param is_finished: Whether a stop condition was reached.
    :param best_score: Score of the best policy; infinite: there is none yet.
    :param directory: The run directory.
    """
    content = {
        "iteration": iteration,
        "is_finished": is_finished,
        "best_score": best_score if math.isfinite(best_score) else None,
    }
    text = json.dumps(content, indent=2) + "\n"
    write_whole(Path(directory) / PROGRESS_FILE, text)


def read_progress(directory: str | Path) -> Mapping[str, Any] | None:
    """Read the file of :func:`write_progress`; `None`: it is missing or damaged."""
    return read_json_object(Path(directory) / PROGRESS_FILE) or None


_SHORT_NAMES = {
    "episode_reward_mean": "env_runners/episode_return_mean",
    "episode_return_mean": "env_runners/episode_return_mean",
    "timesteps_total": "env_runners/num_env_steps_sampled_lifetime",
    "num_env_steps_sampled_lifetime": "env_runners/num_env_steps_sampled_lifetime",
    "episodes_total": "env_runners/num_episodes_lifetime",
}


@dataclass
class TuneParameters(CheckedConfig):
    """The settings of Ray Tune that a single run needs.

    :param stop: The run stops when one of these values of a result is reached: `training_iteration`,
        `timesteps_total`, `time_total_s`, `episode_return_mean` or any path such as
        `env_runners/episode_len_mean`. Empty: only an interrupt stops it.
    :param checkpoint_freq: Number of iterations between checkpoints of Ray; 0: only at the end.
    :param checkpoint_at_end: Whether to write a checkpoint at the end.
    :param keep_all_checkpoints: Whether to keep earlier checkpoints.
    :param verbose: 0: print no line after each iteration.
    """

    section = "runner.tune_config"

    stop: Mapping[str, float] = field(default_factory=dict)
    checkpoint_freq: int = 0
    checkpoint_at_end: bool = True
    keep_all_checkpoints: bool = False
    verbose: int = 1

    def __post_init__(self) -> None:
        stop: Mapping[str, float | None] = self.stop or {}
        self.stop = {key: value for key, value in stop.items() if value is not None}
        for key, value in self.stop.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{self.section}.stop.{key}: expected a number, got {value!r}.")
        self.require_integer("checkpoint_freq", 0)

    def reason_to_stop(self, result: Mapping[str, Any], iteration: int) -> str:
        """Return the stop condition that holds, or an empty text.

        :param result: Result of an iteration.
        :param iteration: Number of the iteration.
        :raises ConfigError: A condition names an unknown value.
        """
        for name, limit in self.stop.items():
            if name == "training_iteration":
                value: float | None = iteration
            else:
                value = value_at(result, _SHORT_NAMES.get(name, name))
            if value is None and name not in _SHORT_NAMES:
                available = [*_SHORT_NAMES, *(key for key in result if value_at(result, key) is not None)]
                raise ConfigError(
                    f"runner.tune_config.stop.{name}: RLlib reports no such number.{did_you_mean(name, available)} "
                    f"Some of the available ones: {', '.join(sorted(available)[:20])}."
                )
            if value is not None and value >= limit:
                return f"{name} has reached {limit:g}"
        return ""

    def is_checkpoint_due(self, iteration: int) -> bool:
        """Return whether to write a checkpoint after an iteration."""
        return bool(self.checkpoint_freq) and iteration % self.checkpoint_freq == 0
