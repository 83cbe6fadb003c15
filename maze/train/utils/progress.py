"""How far a training is: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.log_stats.log_stats import LogStatsAggregator
from maze.core.log_stats.run_console import KPI, QUIET, RETURN, Progressed, active_console
from maze.core.log_stats.stats_format import column_name, significant
from maze.core.utils.files import read_json_object, write_whole
from maze.utils.console import progress_bar

if TYPE_CHECKING:
    from tqdm import tqdm


RECORD_FILE = "run.json"
"""Where a run says how far it is, in its directory; it is read without torch and without its checkpoints."""

RUNNING, ENDED, INTERRUPTED = "running", "ended", "interrupted"


class EpochSummary(NamedTuple):
    """What is left of an epoch."""

    epoch: int
    """Its number, counted from 1."""
    n_steps: int
    """Environment steps of the training so far, this epoch included; 0 where learning takes none."""
    mean_reward: float
    """Mean reward of the training's episodes that ended in it; NaN: none did."""


def write_record(directory: Path, state: str, values: Mapping[str, Any]) -> None:
    """Writes how far a training is, whole or not at all; a disk that does not take it stops no training.

    :param directory: Directory of the run.
    :param state: `running`, `ended` or `interrupted`.
    :param values: Plain values.
    """
    text = json.dumps({"state": state, **values, "process": os.getpid(), "host": socket.gethostname()}, indent=2)
    with suppress(OSError):
        write_whole(directory / RECORD_FILE, f"{text}\n")


def read_record(directory: Path) -> dict[str, Any] | None:
    """How far a training is; `None`: nothing is written down. One that was killed is `interrupted`.

    :param directory: Directory of the run.
    """
    record = read_json_object(directory / RECORD_FILE)
    if not record:
        return None
    if record.get("state") == RUNNING and record.get("host") == socket.gethostname() and not _is_alive(record):
        record["state"] = INTERRUPTED
    return record


def _is_alive(record: Mapping[str, Any]) -> bool:
    process = record.get("process")
    if not isinstance(process, int) or process <= 0:
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


_BAR = "{desc} {percentage:3.0f}%|{bar:10}| "
_REFRESHED = 0.2
"""Seconds between two looks at the episodes of the epoch."""


class TrainingProgress:
    """Shows how far the epoch is, the rate of environment steps, the remaining time and how good the episodes are.

    :param n_epochs: Number of epochs of the training; 0 if unknown.
    :param epoch_length: Number of updates per epoch.
    :param steps_per_update: Number of environment steps per update; 0: updates take none.
    :param describe: What is to be said of the episodes of the epoch so far.
    """

    def __init__(
        self, n_epochs: int, epoch_length: int, steps_per_update: int, describe: Callable[[], str] = str
    ) -> None:
        self.n_epochs = n_epochs
        self.epoch_length = epoch_length
        self.steps_per_update = steps_per_update
        self._describe = describe
        self._console = active_console()
        self._start = self._epoch_start = time.perf_counter()
        self._n_steps = self._n_updates = 0
        """Taken in the epoch by this process."""
        self._epoch, self._update = 0, 0
        self._begun_at: float | None = None
        """Number of epochs that were done when this process began."""
        self._refreshed = 0.0
        self._bar: tqdm[Any] | None = None
        if sys.stderr.isatty() and (self._console is None or self._console.verbose != QUIET):
            self._bar = progress_bar(
                total=self._n_of_bar(),
                bar_format=_BAR,
                dynamic_ncols=True,
                leave=False,
            )

    def start_epoch(self, epoch: int, update: int = 0) -> None:
        """Announces an epoch.

        :param epoch: Its number, counted from 0 in this training.
        :param update: Number of its updates that are done already.
        """
        self._epoch_start = time.perf_counter()
        self._n_steps = self._n_updates = 0
        self._epoch, self._update = epoch, update
        if self._begun_at is None:
            self._begun_at = self._n_epochs_done()
        if self._bar is not None:
            self._bar.set_description_str(f"epoch {epoch + 1}{f'/{self.n_epochs}' if self.n_epochs else ''}", False)
            self._refresh()

    def announce(self, work: str) -> None:
        """Says what is being done from now on: on a terminal the live line does until an epoch has ended."""
        if self._bar is None:
            print(f"-> {work} ...", flush=True)
        else:
            self._draw(f"{work} ...")

    def update_done(self) -> None:
        """Counts one update."""
        self._n_updates += 1
        self._update += 1
        self._n_steps += self.steps_per_update
        if self._bar is not None:
            now = time.perf_counter()
            if now - self._refreshed >= _REFRESHED:
                self._refreshed = now
                self._refresh()

    def before_output(self) -> None:
        """Makes room for lines printed by others."""
        if self._bar is not None:
            self._bar.clear()

    def epoch_done(self, epoch: int, n_done: int, n_env_steps: int = 0, best: str = "") -> float:
        """Prints the lines that end an epoch.

        :param epoch: Number of the epoch, counted from 1.
        :param n_done: Number of epochs completed in this training.
        :param n_env_steps: Environment steps of the training so far.
        :param best: The best score so far, in words.
        :return: Seconds this one took.
        """
        seconds = time.perf_counter() - self._epoch_start
        rate, left = self._rate(), self._left(n_done)
        self.before_output()
        if self._console is not None:
            n_epochs = epoch - n_done + self.n_epochs if self.n_epochs else 0
            progressed = Progressed(epoch, n_epochs, n_env_steps, seconds, rate, left, best)
            self._console.epoch_done(progressed, is_last=n_done == self.n_epochs)
            return seconds
        details = ", ".join(filter(None, (rate, f"about {left} left" if left else "")))
        print(f"Time required for epoch: {seconds:.2f}s" + (f" ({details})" if details else ""))
        print(f"Update epoch - {epoch}", flush=True)
        return seconds

    def training_done(self, best: str = "") -> None:
        """Shows what has been logged since the last lines; the training has ended.

        :param best: The best score, in words.
        """
        if self._console is not None:
            self._console.finish(best)

    def close(self) -> None:
        """Removes the live line."""
        if self._bar is not None:
            self._bar.close()

    def _n_of_bar(self) -> int:
        """Updates of an epoch; where that is a single one, of the training."""
        return self.epoch_length if self.epoch_length > 1 else self.n_epochs

    def _n_epochs_done(self) -> float:
        return self._epoch + self._update / self.epoch_length

    def _refresh(self) -> None:
        assert self._bar is not None
        self._bar.n = self._update if self.epoch_length > 1 else self._epoch + self._update
        left = self._left(self._n_epochs_done())
        parts = [self._rate(), self._describe(), f"{left} left" if left else ""]
        self._draw(", ".join(filter(None, parts)))

    def _draw(self, text: str) -> None:
        assert self._bar is not None
        self._bar.bar_format = _BAR + text.replace("{", "{{").replace("}", "}}")
        self._bar.refresh()

    def _rate(self) -> str:
        seconds = max(time.perf_counter() - self._epoch_start, 1e-9)
        if self._n_steps:
            return f"{self._n_steps / seconds:,.0f} environment steps/s"
        is_learning_only = self._n_updates > 1 and not self.steps_per_update
        return f"{self._n_updates / seconds:,.3g} updates/s" if is_learning_only else ""

    def _left(self, n_done: float) -> str:
        """The time that is left, at the pace of this process; empty: nobody knows."""
        n_own, n_left = n_done - (self._begun_at or 0.0), self.n_epochs - n_done
        if n_left <= 0 or n_own <= 0:
            return ""
        return _duration(n_left * (time.perf_counter() - self._start) / n_own)


def unfinished_epoch(statistics: LogStatsAggregator) -> str:
    """Mean return and first KPI of the episodes that have ended in an epoch; before, those of the epoch before.

    :param statistics: Statistics of its episodes.
    """
    shown = {RETURN: statistics.pending(BaseEnvEvents.reward, "sum").get(None)}
    kpis = statistics.pending(BaseEnvEvents.kpi)
    if kpis:
        group, values = next(iter(kpis.items()))
        shown["/".join(map(str, group or ()))] = values
    if any(shown.values()):
        return ", ".join(f"{name} {significant(sum(values) / len(values))}" for name, values in shown.items() if values)
    last = {column_name(key): value for key, value in statistics.last_stats.items()}
    names = {RETURN: "BaseEnvEvents/reward/mean"} | {name: f"{KPI}mean/{name}" for name in list(shown)[1:]}
    return ", ".join(f"{label} {significant(last[name])}" for label, name in names.items() if name in last)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
