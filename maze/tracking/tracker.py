"""The interface of experiment trackers: statistics, figures, settings and files of a run go somewhere else as well."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from maze.core.annotations import override
from maze.core.log_stats.log_stats import LogStats, LogStatsWriter, RunPlace, StatsContext
from maze.core.log_stats.stats_format import Figures, columns_of, statistic_name
from maze.core.utils.files import read_json_object, write_whole

TRACKING_FILE = "tracking.json"
"""Where a run notes what trackers call it, in its directory; a run that goes on with it goes on there."""
FINISHED, INTERRUPTED, FAILED = "finished", "interrupted", "failed"
_FILES = {
    "settings": ("hydra_config.yaml", "command.txt", "versions.json"),
    "statistics": ("progress.csv", "maze_cli.log"),
    "report": ("report.html",),
    "figures": ("*.png", "*.svg", "*.pdf"),
    "checkpoints": ("*.pt", "spaces_config.pkl", "statistics*.pkl"),
}
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run when it begins.

    :param place: Where it works.
    :param settings: Its hyper-parameters, by path.
    :param resumed: Directory of the run that it goes on with; `None`: it begins anew.
    """

    place: RunPlace
    settings: Mapping[str, bool | float | str] = field(default_factory=dict)
    resumed: Path | None = None

    @property
    def name(self) -> str:
        """The last two parts of its directory: what it is, and when it began or which of a sweep it is."""
        return "/".join(self.place.directory.absolute().parts[-2:])

    def identity(self, tracker: str) -> str | None:
        """What a tracker calls the run that this one goes on with; `None`: it knows of none."""
        identity = None if self.resumed is None else _identities(self.resumed).get(tracker)
        return identity if isinstance(identity, str) else None

    def remember(self, tracker: str, identity: str) -> None:
        """Notes what a tracker calls the run.

        :raises OSError: The disk does not take it.
        """
        directory = self.place.directory
        text = json.dumps({**_identities(directory), tracker: identity}, indent=2)
        write_whole(directory / TRACKING_FILE, f"{text}\n")

    def files(self) -> Iterator[tuple[str, Path]]:
        """The files that are worth keeping, each with what it belongs to: settings, statistics, figures, ..."""
        for kind, patterns in _FILES.items():
            for pattern in patterns:
                yield from ((kind, path) for path in sorted(self.place.directory.glob(pattern)))


class Tracker(LogStatsWriter, ABC):
    """Hands what a run writes to a tracker of experiments.

    Whatever fails in it, the run goes on without it, with one warning. Numbers are called as in `progress.csv`, after
    the prefix: `train/BaseEnvEvents/reward/mean`; distributions are shares of categories, or quantiles.

    :param figures: Whether to hand over the figures of `define_plot`.
    :param checkpoints: Whether to hand over the weights at the end.
    """

    failures: ClassVar[tuple[type[Exception], ...]] = (Exception,)
    name: ClassVar[str]
    """What it is called in `tracking.json`."""

    def __init__(self, figures: bool = True, checkpoints: bool = True) -> None:
        self._with_figures, self._with_checkpoints = figures, checkpoints
        self._run: TrackedRun | None = None
        self._figures = Figures()
        self._numbers: dict[str, tuple[int, int | None, dict[str, float]]] = {}

    # -- what trackers differ in -----------------------------------------------------------------------

    @abstractmethod
    def _begin(self, run: TrackedRun, identity: str | None) -> str:
        """Begins a run there, or goes on with one.

        :param identity: Of the run to go on with.
        :return: What the run is called there.
        """

    @abstractmethod
    def _log(self, path: str, step: int, n_env_steps: int | None, numbers: Mapping[str, float]) -> None:
        """Takes the numbers of one log step and prefix.

        :param n_env_steps: Environment steps of the training so far; `None`: nobody counts them.
        """

    @abstractmethod
    def _log_picture(self, name: str, step: int, png: bytes) -> None:
        """Takes a figure."""

    @abstractmethod
    def _end(self, state: str, files: list[tuple[str, Path]]) -> None:
        """Takes the files of the run, and how it ended: `finished`, `interrupted` or `failed`."""

    def _samples(self, name: str, step: int, value: Any) -> None:
        """Takes a statistic as it is, of which the numbers were taken; for trackers that show distributions."""

    # -- what they share -------------------------------------------------------------------------------

    def begin(self, run: TrackedRun, figures: Figures | None = None) -> None:
        """Begins to track a run.

        :param run: The run.
        :param figures: Draws figures, for other writers as well.
        """
        self._figures = figures or self._figures
        run.remember(self.name, self._begin(run, run.identity(self.name)))
        self._run = run  # otherwise there is nothing to end

    @override(LogStatsWriter)
    def write(self, path: str | None, step: int, stats: LogStats) -> None:
        if self._run is None:
            return
        prefix = path or "stats"
        if prefix in self._numbers and self._numbers[prefix][0] != step:
            self._flush()
        numbers = self._numbers[prefix][2] if prefix in self._numbers else {}
        for key, value in stats.items():
            name = statistic_name(key)
            numbers.update(columns_of(name, value))
            self._samples(f"{prefix}/{name}", step, value)
            for picture in self._figures.of(path, step, key, value) if self._with_figures else ():
                self._log_picture(f"{prefix}/{name}/{picture.name}", step, picture.png)
        self._numbers[prefix] = (step, StatsContext.active().n_env_steps, numbers)

    @override(LogStatsWriter)
    def on_log_step_increment(self) -> None:
        self._flush()

    @override(LogStatsWriter)
    def close(self) -> None:
        error = sys.exc_info()[1]  # writers are closed when the run's context is left
        run, self._run = self._run, None
        if run is None:
            return
        self._flush()
        state = FINISHED if error is None else INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
        self._end(state, [file for file in run.files() if self._with_checkpoints or file[0] != CHECKPOINTS])

    def _flush(self) -> None:
        numbers, self._numbers = self._numbers, {}
        for path, (step, n_env_steps, values) in numbers.items():
            self._log(path, step, n_env_steps, values)


def _identities(directory: Path) -> dict[str, Any]:
    return read_json_object(directory / TRACKING_FILE)
