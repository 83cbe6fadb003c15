"""The interface of experiment trackers, which receive statistics, figures, settings and files of a run."""

from __future__ import annotations

import json
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
"""File with the identities of a run in its trackers, in its directory; a resumed run continues there."""
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
    """A run at its beginning.

    :param place: Its directories.
    :param settings: Its hyper-parameters, by path.
    :param resumed: Directory of the run that it resumes; `None`: a new run.
    """

    place: RunPlace
    settings: Mapping[str, bool | float | str] = field(default_factory=dict)
    resumed: Path | None = None

    @property
    def name(self) -> str:
        """The last two parts of its directory: its kind, and its time or number in a sweep."""
        return "/".join(self.place.directory.absolute().parts[-2:])

    def identity(self, tracker: str) -> str | None:
        """Return the identity of the resumed run in a tracker; `None`: none."""
        identity = None if self.resumed is None else read_json_object(self.resumed / TRACKING_FILE).get(tracker)
        return identity if isinstance(identity, str) else None

    def remember(self, tracker: str, identity: str) -> None:
        """Store the identity of the run in a tracker.

        :raises OSError: Writing failed.
        """
        directory = self.place.directory
        text = json.dumps({**read_json_object(directory / TRACKING_FILE), tracker: identity}, indent=2)
        write_whole(directory / TRACKING_FILE, f"{text}\n")

    def files(self) -> Iterator[tuple[str, Path]]:
        """Yield the files to upload, each with its kind: settings, statistics, figures, ..."""
        for kind, patterns in _FILES.items():
            for pattern in patterns:
                yield from ((kind, path) for path in sorted(self.place.directory.glob(pattern)))


class Tracker(LogStatsWriter, ABC):
    """Log a run to an experiment tracker.

    After an error in a tracker, the run continues without it, with one warning. Numbers have their names in
    `progress.csv`, after the prefix: `train/BaseEnvEvents/reward/mean`; distributions are logged as shares of
    categories, or quantiles.

    :param figures: Whether to log the figures of `define_plot`.
    :param checkpoints: Whether to upload the weights at the end.
    """

    failures: ClassVar[tuple[type[Exception], ...]] = (Exception,)
    name: ClassVar[str]
    """Its name in `tracking.json`."""

    def __init__(self, figures: bool = True, checkpoints: bool = True) -> None:
        self._with_figures, self._with_checkpoints = figures, checkpoints
        self._run: TrackedRun | None = None
        self._figures = Figures()
        self._numbers: dict[str, tuple[int, int | None, dict[str, float]]] = {}

    # -- specific to each tracker ----------------------------------------------------------------------

    @abstractmethod
    def _begin(self, run: TrackedRun, identity: str | None) -> str:
        """Begin a run in the tracker, or resume one.

        :param identity: Identity of the run to resume.
        :return: Identity of the run.
        """

    @abstractmethod
    def _log(self, path: str, step: int, n_env_steps: int | None, numbers: Mapping[str, float]) -> None:
        """Log the numbers of one log step and prefix.

        :param n_env_steps: Environment steps of the run so far; `None`: not counted.
        """

    @abstractmethod
    def _log_picture(self, name: str, step: int, png: bytes) -> None:
        """Log a figure."""

    @abstractmethod
    def _end(self, state: str, files: list[tuple[str, Path]]) -> None:
        """Upload the files of the run, and report its final state: `finished`, `interrupted` or `failed`."""

    def _samples(self, name: str, step: int, value: Any) -> None:
        """Log the samples of a statistic, for trackers that show distributions."""

    # -- shared ----------------------------------------------------------------------------------------

    def begin(self, run: TrackedRun, figures: Figures | None = None) -> None:
        """Begin to track a run.

        :param run: The run.
        :param figures: Draws figures, shared with other writers.
        """
        self._figures = figures or self._figures
        run.remember(self.name, self._begin(run, run.identity(self.name)))
        self._run = run  # only after `_begin`: :meth:`close` ends tracked runs

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
        error = StatsContext.active().error
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
