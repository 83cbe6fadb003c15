"""Progress of runs on the console: live lines, and a short table for each epoch."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from maze.console.streams import print_text
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats import LogStats, LogStatsWriter, StatsContext
from maze.core.log_stats.stats_format import scalar_value, significant, statistic_name
from maze.core.utils.files import aligned

QUIET, SHORT, EVERYTHING = 0, 1, 2
"""Values of `verbose`: only warnings and errors; a short table; the configuration and every statistic."""
INTERVAL = 5.0
"""Seconds between two tables."""
TRAINING = "train"
RETURN, LENGTH = "return", "episode length"
_REWARD, KPI = "BaseEnvEvents/reward/", "BaseEnvEvents/kpi/"
_NAMED_ROWS = {RETURN: (f"{_REWARD}mean", f"{_REWARD}std"), LENGTH: (f"{_REWARD}mean_step_count", None)}
_MOST_KPIS, _MOST_OF_LEARNING, _MOST_OF_BOTH = 3, 3, 5
# Endings of the names of events about learning, the most informative first.
_LEARNING = ("loss", "accuracy", "deviation", "entropy", "epsilon", "approx_kl", "_norm", "ratio")
_MOST_GROUPS = 3
_WIDEST = 120
# Seconds between two updates of a live line.
_REFRESHED = 0.2


class Progressed(NamedTuple):
    """State of a training run after an epoch.

    :param epoch: Number of completed epochs; 0: the initial policy was evaluated.
    :param n_epochs: Number of epochs of the run; 0: unknown.
    :param n_env_steps: Environment steps so far; 0: not counted.
    :param seconds: Duration of the epoch.
    :param rate: Environment steps per second, or another rate, with its unit; empty: unknown.
    :param left: Remaining time with its unit; empty: unknown.
    :param best: The best score so far; empty: there is none.
    :param unit: Name of the unit of epochs.
    """

    epoch: int
    n_epochs: int = 0
    n_env_steps: int = 0
    seconds: float = math.nan
    rate: str = ""
    left: str = ""
    best: str = ""
    unit: str = "epoch"


class Row(NamedTuple):
    """A row of the table.

    :param label: Its label.
    :param columns: The statistics it shows; several where an event has groups.
    :param spread: The statistic with their standard deviation.
    """

    label: str
    columns: tuple[str, ...]
    spread: str | None = None


class RunConsole(LogStatsWriter):
    """Keep the latest statistics of a run and show six to ten of them for each epoch.

    An epoch is shown once its evaluation is complete: evaluation figures are those of the policy after the epoch.

    :param verbose: 0: show nothing; 1: show them.
    :param rows: The rows in their order (or one): `return`, `episode length`, `learning_rate`, the name of a KPI or of
        another event, or a column of `progress.csv`; empty: chosen from the existing statistics.
    :param interval: Seconds between two tables.
    :param clock: Seconds, from any origin.
    """

    def __init__(
        self,
        verbose: int = SHORT,
        rows: str | Sequence[str] = (),
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.verbose = verbose
        self.interval = interval
        self._wanted = [str(row) for row in ([rows] if isinstance(rows, str) else rows)]
        self._clock = clock
        self._paths: dict[str, tuple[int, dict[str, float]]] = {}
        self._next = -math.inf
        self._waiting: Progressed | None = None

    @override(LogStatsWriter)
    def write(self, path: str | None, step: int, stats: LogStats) -> None:
        known_step, values = self._paths.get(path or "", (step, {}))
        if known_step != step:
            values = {}
        for key, value in stats.items():
            if (number := scalar_value(value)) is not None:
                values[statistic_name(key)] = number
        self._paths[path or ""] = (step, values)

    def epoch_done(self, progressed: Progressed) -> None:
        """Show the statistics of an epoch, unless others were shown less than an interval ago.

        :param progressed: State of the run after the evaluation of the epoch, if there is one.
        """
        self._waiting = progressed
        now = self._clock()
        if now >= self._next:
            if progressed.epoch:
                self._next = now + self.interval
            self.finish()

    def finish(self) -> None:
        """Show the last epoch if it has not been shown yet, as at the end of the run."""
        progressed, self._waiting = self._waiting, None
        if progressed is not None and self.verbose != QUIET:
            print_text("\n".join(self.table(progressed)))

    def cells(self) -> dict[str, dict[str, str]]:
        """Return the figures of each row by prefix, such as `train`; `-` where the prefix has no such statistic."""
        columns = self._columns()
        return {row.label: {path: _cell(row, values) for path, values in columns.items()} for row in self._rows()}

    def table(self, progressed: Progressed) -> list[str]:
        """Return the state of a training run as lines: a heading, and the figures by row and prefix.

        :param progressed: State of the run.
        """
        paths = list(self._columns()) or [TRAINING]
        cells = self.cells().items()
        rows = [["", *paths], *([label, *(figures.get(path, "-") for path in paths)] for label, figures in cells)]
        blank = [""] * (len(paths) - 1)
        if progressed.rate:
            rate, _, unit = progressed.rate.partition(" ")
            rows.append([unit, rate, *blank])
        if not math.isnan(progressed.seconds):
            rows.append(["time", f"{significant(progressed.seconds, 3)} s", *blank])
        lines = [", ".join(_heading(progressed)), *(f"  {line}" for line in aligned(rows))]
        width = shutil.get_terminal_size((_WIDEST, 0)).columns
        return [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]

    def _columns(self) -> dict[str, dict[str, float]]:
        """Return the latest statistics by prefix, those of training first."""
        in_order = sorted(self._paths.items(), key=lambda item: item[0] != TRAINING)
        return {path: values for path, (_, values) in in_order if values}

    def _known_rows(self) -> dict[str, Row]:
        """Return all rows by the names that configure them."""
        names = list(dict.fromkeys(name for _, values in self._paths.values() for name in values))
        named = {name: of_row for name, of_row in _NAMED_ROWS.items() if of_row[0] in names}
        rows = {name: Row(name, (column,), spread) for name, (column, spread) in named.items()}
        by_event: dict[str, list[str]] = {}
        for name in names:
            if name.startswith(f"{KPI}mean/"):
                kpi = name.removeprefix(f"{KPI}mean/")
                rows.setdefault(kpi, Row(kpi, (name,), f"{KPI}std/{kpi}"))
            rows.setdefault(name, Row(name, (name,)))
            by_event.setdefault(_event(name), []).append(name)
        return {event: Row(event, tuple(of_event)) for event, of_event in by_event.items()} | rows

    def _rows(self) -> list[Row]:
        """Return the configured rows, or else a selection of the existing ones."""
        rows = self._known_rows()
        if self._wanted:
            return [rows.get(wanted, Row(wanted, ())) for wanted in self._wanted]
        kpis = [row for row in rows.values() if row.spread and row.label not in _NAMED_ROWS][:_MOST_KPIS]
        names = [row.label for row in rows.values() if row.columns == (row.label,)]
        events = dict.fromkeys(_event(name) for name in names if not name.startswith("BaseEnvEvents"))
        learning = [event for part in _LEARNING for event in events if event.endswith(part)]
        learning = learning[: min(_MOST_OF_LEARNING, _MOST_OF_BOTH - len(kpis))]
        learning += ["learning_rate"] if "learning_rate" in events else []
        named = [rows[label] for label in _NAMED_ROWS if label in rows]
        return [*named, *kpis, *(rows[event] for event in learning)]


def active_console() -> RunConsole | None:
    """Return the console of the active statistics context; `None`: every statistic is printed."""
    return next((writer for writer in StatsContext.active().writers if isinstance(writer, RunConsole)), None)


def print_header(text: str) -> None:
    """Print a line that introduces what follows, if every statistic is shown."""
    if active_console() is None:
        print(f"\n********** {text} **********", flush=True)


def checked_verbosity(value: object) -> int:
    """Return the value of `verbose`: 0, 1 or 2.

    :raises ConfigError: It is none of these.
    """
    if type(value) is int and value in (QUIET, SHORT, EVERYTHING):
        return value
    raise ConfigError(
        f"verbose: expected 0 (warnings and errors), 1 (a short table) or 2 (the configuration and every statistic), "
        f"found {value!r}."
    )


def _event(name: str) -> str:
    """Return the event of a statistic; for RLlib, whose events are groups, the last part of its name."""
    interface, _, rest = name.partition("/")
    return rest.rpartition("/")[2] if interface == "RLlibEvents" else rest.partition("/")[0]


def _cell(row: Row, values: dict[str, float]) -> str:
    if not (found := [values[column] for column in row.columns if column in values]):
        return "-"
    if len(found) > _MOST_GROUPS:
        return f"{significant(min(found))} … {significant(max(found))}"
    text = " / ".join(map(significant, found))
    spread = values.get(row.spread or "")
    return text if spread is None else f"{text} ± {significant(spread, 3)}"


def _heading(progressed: Progressed) -> Iterator[str]:
    of_all = f"/{progressed.n_epochs}" if progressed.n_epochs else ""
    yield f"{progressed.unit} {progressed.epoch}{of_all}"
    if progressed.n_env_steps:
        yield f"{progressed.n_env_steps:,} environment steps"
    if progressed.best:
        yield f"best {progressed.best}"
    if progressed.left:
        yield f"about {progressed.left} left"


class LiveLine:
    """A line of the terminal that stderr is, which is drawn again and again.

    The calling thread draws it: a thread of its own would outlive a fork.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True)
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )

    def draw(self, text: str) -> None:
        """Draw the line."""
        from rich.text import Text

        self._live.start()
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def clear(self) -> None:
        """Remove the line until it is drawn again."""
        self._live.stop()


def live_line() -> LiveLine | None:
    """Return a live line; `None` where stderr is not a terminal or nothing may be printed."""
    console = active_console()
    is_quiet = console is not None and console.verbose == QUIET
    return None if is_quiet or sys.stderr is None or not sys.stderr.isatty() else LiveLine()


class Progress:
    """Show the progress of work that consists of equal units, such as episodes.

    Where there is no terminal, five lines are printed.

    :param total: Number of episodes.
    :param description: Name of the work.
    """

    def __init__(self, total: int, description: str) -> None:
        self.total = total
        self.description = description
        self.n_done = 0
        self._line_after = max(1, -(-total // 5))
        self._start = self._refreshed = time.monotonic()
        self._line = live_line()

    def update(self) -> None:
        """Count one more unit as done."""
        self.n_done += 1
        now = time.monotonic()
        rate = self.n_done / max(now - self._start, 1e-9)
        state = f"{self.n_done}/{self.total} episodes, {rate:.3g}/s, {(self.total - self.n_done) / rate:.0f} s left"
        if self._line is None:
            if self.n_done % self._line_after == 0 or self.n_done == self.total:
                print(f"{self.description}: {state}", flush=True)
        elif now - self._refreshed >= _REFRESHED:
            self._refreshed = now
            self._line.draw(f"{self.description}: {state}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._line is not None:
            self._line.clear()


class TrainingProgress:
    """Show the progress of the epoch, the rate of environment steps and the remaining time.

    :param n_epochs: Number of epochs of the run; 0: unknown.
    :param epoch_length: Number of updates per epoch.
    :param steps_per_update: Number of environment steps per update; 0: updates take none.
    """

    def __init__(self, n_epochs: int, epoch_length: int, steps_per_update: int) -> None:
        self.n_epochs = n_epochs
        self.epoch_length = epoch_length
        self.steps_per_update = steps_per_update
        self._console = active_console()
        self._start = self._epoch_start = time.perf_counter()
        # Taken in the epoch by this process.
        self._n_steps = self._n_updates = 0
        self._epoch, self._update = 0, 0
        # Number of completed epochs at the start of this process.
        self._begun_at: float | None = None
        self._refreshed = 0.0
        # The epoch that has ended and has not been evaluated yet.
        self._waiting: Progressed | None = None
        self._line = live_line()

    def start_epoch(self, epoch: int, update: int = 0) -> None:
        """Announce an epoch.

        :param epoch: Its number in this run, from 0.
        :param update: Number of its completed updates.
        """
        self._epoch_start = time.perf_counter()
        self._n_steps = self._n_updates = 0
        self._epoch, self._update = epoch, update
        if self._begun_at is None:
            self._begun_at = self._n_epochs_done()
        self._refresh()

    def announce(self, work: str) -> None:
        """Announce the next work; on a terminal in the live line."""
        if self._line is None:
            print(f"-> {work} ...", flush=True)
        else:
            self._draw(f"{work} ...")

    def first_evaluation(self, epoch: int) -> None:
        """Announce the evaluation of the initial policy.

        :param epoch: Number of epochs completed before.
        """
        self.announce("evaluating the initial policy")
        self._waiting = Progressed(epoch, epoch + self.n_epochs if self.n_epochs else 0)

    def update_done(self) -> None:
        """Count one update."""
        self._n_updates += 1
        self._update += 1
        self._n_steps += self.steps_per_update
        if self._line is not None and time.perf_counter() - self._refreshed >= _REFRESHED:
            self._refreshed = time.perf_counter()
            self._refresh()

    def before_output(self) -> None:
        """Clear the live line before other output."""
        if self._line is not None:
            self._line.clear()

    def epoch_done(self, epoch: int, n_done: int, n_env_steps: int = 0) -> float:
        """Complete an epoch.

        :param epoch: Number of the epoch, counted from 1.
        :param n_done: Number of epochs completed in this run.
        :param n_env_steps: Environment steps of the run so far.
        :return: Duration of the epoch in seconds.
        """
        seconds = time.perf_counter() - self._epoch_start
        rate, left = self._rate(), self._left(n_done)
        self.before_output()
        if self._console is None:
            details = ", ".join(filter(None, (rate, f"about {left} left" if left else "")))
            print(f"Time required for epoch: {seconds:.2f}s" + (f" ({details})" if details else ""))
            print(f"Update epoch - {epoch}", flush=True)
        n_epochs = epoch - n_done + self.n_epochs if self.n_epochs else 0
        self._waiting = Progressed(epoch, n_epochs, n_env_steps, seconds, rate, left)
        return seconds

    def evaluated(self, best: str) -> None:
        """Show the last epoch, after its evaluation if there is one.

        :param best: The best score so far; empty: there is none.
        """
        progressed, self._waiting = self._waiting, None
        if self._console is not None and progressed is not None:
            self.before_output()
            self._console.epoch_done(progressed._replace(best=best))

    def training_done(self, best: str) -> None:
        """Show the last epoch at the end of the run, independent of the interval."""
        self.evaluated(best)
        if self._console is not None:
            self._console.finish()

    def _n_epochs_done(self) -> float:
        return self._epoch + self._update / self.epoch_length

    def _refresh(self) -> None:
        if self._line is not None:
            left = self._left(self._n_epochs_done())
            self._draw(", ".join(filter(None, (self._rate(), f"{left} left" if left else ""))))

    def _draw(self, text: str) -> None:
        assert self._line is not None
        updates = f", update {self._update}/{self.epoch_length}" if self.epoch_length > 1 else ""
        self._line.draw(f"epoch {self._epoch + 1}{f'/{self.n_epochs}' if self.n_epochs else ''}{updates}: {text}")

    def _rate(self) -> str:
        seconds = max(time.perf_counter() - self._epoch_start, 1e-9)
        if self._n_steps:
            return f"{self._n_steps / seconds:,.0f} environment steps/s"
        is_learning_only = self._n_updates > 1 and not self.steps_per_update
        return f"{self._n_updates / seconds:,.3g} updates/s" if is_learning_only else ""

    def _left(self, n_done: float) -> str:
        """Return the remaining time at the current rate; empty: unknown."""
        n_own, n_left = n_done - (self._begun_at or 0.0), self.n_epochs - n_done
        if n_left <= 0 or n_own <= 0:
            return ""
        return duration_text(n_left * (time.perf_counter() - self._start) / n_own)


def duration_text(seconds: float) -> str:
    """Return a duration with its unit."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
