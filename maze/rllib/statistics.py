"""Results of RLlib, statistics of its environments on the way to Maze's writers, and conditions that end a training."""

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


_SHORT_NAMES = {
    "episode_reward_mean": "env_runners/episode_return_mean",
    "episode_return_mean": "env_runners/episode_return_mean",
    "timesteps_total": "env_runners/num_env_steps_sampled_lifetime",
    "num_env_steps_sampled_lifetime": "env_runners/num_env_steps_sampled_lifetime",
    "episodes_total": "env_runners/num_episodes_lifetime",
}


@dataclass
class TuneParameters(CheckedConfig):
    """The part of Ray Tune's vocabulary that one training needs.

    :param stop: The training stops as soon as one of these values of a result is reached: `training_iteration`,
        `timesteps_total`, `time_total_s`, `episode_return_mean` or any path such as
        `env_runners/episode_len_mean`. Empty: only an interrupt stops it.
    :param checkpoint_freq: Write a checkpoint of Ray's after every so many iterations; 0: only at the end.
    :param checkpoint_at_end: Write one at the end.
    :param keep_all_checkpoints: Keep the earlier ones too.
    :param verbose: 0: no line after each iteration.
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
        """Which condition holds, or an empty text.

        :param result: The result of an iteration.
        :param iteration: Its number.
        :raises ConfigError: A condition names what no result has.
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
                    f"Some of those it does: {', '.join(sorted(available)[:20])}."
                )
            if value is not None and value >= limit:
                return f"{name} has reached {limit:g}"
        return ""

    def is_checkpoint_due(self, iteration: int) -> bool:
        """Whether a checkpoint is to be written after this iteration."""
        return bool(self.checkpoint_freq) and iteration % self.checkpoint_freq == 0
