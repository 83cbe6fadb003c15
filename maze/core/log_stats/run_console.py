"""What a run shows of its statistics while it goes on: a short table on a terminal, a line elsewhere."""

from __future__ import annotations

import difflib
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats import LogStats, LogStatsWriter, StatsContext
from maze.core.log_stats.log_stats_writer_console import print_text
from maze.core.log_stats.stats_format import column_name, event_names, scalar_value, significant
from maze.utils.bcolors import BColors

QUIET, SHORT, EVERYTHING = 0, 1, 2
"""Values of `verbose`: nothing but warnings and errors; a short table; the configuration and every statistic."""
INTERVAL = 5.0
"""Seconds between two tables, or two lines."""
TRAINING = "train"
RETURN, LENGTH = "return", "episode length"
_REWARD, KPI = "BaseEnvEvents/reward/", "BaseEnvEvents/kpi/"
_KNOWN = {
    RETURN: (f"{_REWARD}mean", f"{_REWARD}std"),
    LENGTH: (f"{_REWARD}mean_step_count", None),
}
_MOST_KPIS, _MOST_OF_LEARNING, _MOST_OF_BOTH = 3, 3, 5
_LEARNING = ("loss", "accuracy", "deviation", "entropy", "epsilon", "approx_kl", "_norm", "ratio")
"""What says most about learning, by parts of events' names; the first come first."""
_MOST_GROUPS = 3
_WIDEST = 120


class Progressed(NamedTuple):
    """How far a training is.

    :param epoch: Number of the epoch that has ended.
    :param n_epochs: Of how many; 0: nobody knows.
    :param n_env_steps: Environment steps so far; 0: it takes none.
    :param seconds: How long the epoch took.
    :param rate: Environment steps per second, or another rate; empty: unknown.
    :param left: The time that is left, in words; empty: unknown.
    :param best: The best score so far, in words; empty: there is none.
    :param unit: What an epoch is called.
    """

    epoch: int
    n_epochs: int = 0
    n_env_steps: int = 0
    seconds: float = math.nan
    rate: str = ""
    left: str = ""
    best: str = ""
    unit: str = "epoch"


@dataclass(frozen=True)
class Row:
    """A row of the table.

    :param label: What it is called.
    :param columns: The statistics whose values stand in it; several where an event has groups.
    :param spread: The statistic that says how far values spread.
    """

    label: str
    columns: tuple[str, ...]
    spread: str | None = None


class RunConsole(LogStatsWriter):
    """Keeps the latest statistics of a run, and shows six to ten of them when an epoch ends.

    :param verbose: 0: show nothing; 1: show them.
    :param rows: What is shown, in this order: `return`, `episode length`, `learning_rate`, the name of a KPI or of
        another event, or a statistic as it is called in `progress.csv`; empty: chosen by what there is.
    :param interval: Seconds between two tables.
    :param clock: Seconds, from any origin.
    """

    def __init__(
        self,
        verbose: int = SHORT,
        rows: Sequence[str] = (),
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.verbose = verbose
        self.interval = interval
        self._wanted = [str(row) for row in rows]
        self._clock = clock
        self._paths: dict[str, tuple[int, dict[str, float]]] = {}
        self._interfaces: dict[str, bool] = {}
        """Interfaces of events, and whether they are the environment's own."""
        self._next = -math.inf
        self._waiting: Progressed | None = None
        self._is_checked = False

    @override(LogStatsWriter)
    def write(self, path: str | None, step: int, stats: LogStats) -> None:
        known_step, values = self._paths.get(path or "", (step, {}))
        if known_step != step:
            values = {}
        for key, value in stats.items():
            number = scalar_value(value)
            if number is not None:
                values[column_name(key)] = number
                self._interfaces[event_names(key.event)[0]] = not key.event.__module__.startswith("maze.")
        self._paths[path or ""] = (step, values)

    def epoch_done(self, progressed: Progressed, is_last: bool = False) -> None:
        """Shows the statistics of an epoch, or keeps them where the latest ones were shown a moment ago.

        :param progressed: How far the training is.
        :param is_last: Whether another call follows only after the training: :meth:`finish` then shows them.
        """
        self._waiting = progressed
        now = self._clock()
        if now >= self._next and not is_last:
            self._next = now + self.interval
            self._show()

    def finish(self, best: str = "") -> None:
        """Shows what has not been shown yet.

        :param best: The best score, in words.
        """
        if self._waiting is not None:
            self._waiting = self._waiting._replace(best=best or self._waiting.best)
            self._show()

    def text(self, progressed: Progressed, width: int, is_table: bool, is_styled: bool = False) -> str:
        """The latest statistics as a table, or in a line.

        :param progressed: How far the training is.
        :param width: Number of letters in a line of the table.
        :param is_table: Whether it is a table.
        :param is_styled: Whether the terminal shows headings in bold.
        """
        in_order = sorted(self._paths.items(), key=lambda item: item[0] != TRAINING)
        columns = {path: values for path, (_, values) in in_order if values}
        rows = self.rows()
        if not is_table:
            return _line(progressed, rows, columns, has_all_rows=bool(self._wanted))
        return _table(progressed, rows, columns, width, is_styled)

    def rows(self) -> list[Row]:
        """What is shown: what was asked for, or else what says most."""
        names = list(dict.fromkeys(name for _, values in self._paths.values() for name in values))
        if self._wanted:
            rows = [_row(wanted, names) for wanted in self._wanted]
            return [row if row is not None else Row(name, ()) for row, name in zip(rows, self._wanted, strict=True)]
        return list(self._chosen(names))

    def _chosen(self, names: Sequence[str]) -> Iterator[Row]:
        for label in (RETURN, LENGTH):
            row = _row(label, names)
            if row is not None:
                yield row
        kpis = [name for name in names if name.startswith(f"{KPI}mean/")]
        for name in kpis[:_MOST_KPIS]:
            yield _kpi_row(name)
        if not kpis:
            own = [name for name in names if self._interfaces.get(name.partition("/")[0])]
            yield from (Row("/".join(name.split("/")[1:]), (name,)) for name in own[:2])
        by_event: dict[str, list[str]] = {}
        for name in names:
            if not name.startswith("BaseEnvEvents") and not self._interfaces.get(name.partition("/")[0]):
                by_event.setdefault(_event(name), []).append(name)
        learning = [event for part in _LEARNING for event in by_event if event.endswith(part)]
        for event in learning[: min(_MOST_OF_LEARNING, _MOST_OF_BOTH - len(kpis[:_MOST_KPIS]))]:
            yield Row(event, tuple(by_event[event]))
        if "learning_rate" in by_event:
            yield Row("learning_rate", tuple(by_event["learning_rate"]))

    def _show(self) -> None:
        progressed, self._waiting = self._waiting, None
        if progressed is None or self.verbose == QUIET:
            return
        self._tell_of_unknown_rows()
        is_terminal = sys.stdout.isatty()
        width = min(shutil.get_terminal_size().columns, _WIDEST)
        print_text(self.text(progressed, width, is_terminal, is_terminal and has_colours()))

    def _tell_of_unknown_rows(self) -> None:
        if self._is_checked:
            return
        self._is_checked = True
        names = list(dict.fromkeys(name for _, values in self._paths.values() for name in values))
        for wanted in self._wanted:
            if _row(wanted, names) is None:
                short = [name.removeprefix(f"{KPI}mean/") for name in names]
                close = difflib.get_close_matches(wanted, [*_KNOWN, *short, *map(_event, names)], n=3)
                hint = f" Did you mean {' or '.join(dict.fromkeys(close))}?" if close else ""
                print(f"console.rows: no statistic is called `{wanted}` so far.{hint}", file=sys.stderr, flush=True)


def active_console() -> RunConsole | None:
    """That of the active statistics context; `None`: every statistic is shown."""
    consoles = (writer for writer in StatsContext.active().writers if isinstance(writer, RunConsole))
    return next(consoles, None)


def print_header(text: str) -> None:
    """Print a line that introduces what follows, if every statistic is shown."""
    if active_console() is None:
        print(f"\n********** {text} **********", flush=True)


def checked_verbosity(value: object) -> int:
    """How much is shown: 0, 1 or 2.

    :raises ConfigError: It is none of these.
    """
    if value in (QUIET, SHORT, EVERYTHING) and not isinstance(value, bool):
        return int(str(value))
    raise ConfigError(
        f"verbose: expected 0 (warnings and errors), 1 (a short table) or 2 (the configuration and every statistic), "
        f"got {value!r}."
    )


def has_colours() -> bool:
    """Whether a terminal may be sent styles (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _row(wanted: str, names: Sequence[str]) -> Row | None:
    if wanted in _KNOWN:
        column, spread = _KNOWN[wanted]
        return Row(wanted, (column,), spread) if column in names else None
    if f"{KPI}mean/{wanted}" in names:
        return _kpi_row(f"{KPI}mean/{wanted}")
    if wanted in names:
        return Row(wanted, (wanted,))
    of_event = tuple(name for name in names if _event(name) == wanted)
    return Row(wanted, of_event) if of_event else None


def _kpi_row(name: str) -> Row:
    kpi = name.removeprefix(f"{KPI}mean/")
    return Row(kpi, (name,), f"{KPI}std/{kpi}")


def _event(name: str) -> str:
    """The event of a statistic; of RLlib's, whose events are groups, what stands last."""
    interface, _, rest = name.partition("/")
    return rest.rpartition("/")[2] if interface == "RLlibEvents" else rest.partition("/")[0]


def _cell(row: Row, values: dict[str, float]) -> str:
    found = [values[column] for column in row.columns if column in values]
    if not found:
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


def _time_rows(progressed: Progressed) -> Iterator[tuple[str, str]]:
    if progressed.rate:
        rate, _, unit = progressed.rate.partition(" ")
        yield unit, rate
    if not math.isnan(progressed.seconds):
        yield "time", f"{significant(progressed.seconds, 3)} s"


def _table(
    progressed: Progressed, rows: Iterable[Row], columns: dict[str, dict[str, float]], width: int, is_styled: bool
) -> str:
    lines = [("", list(columns))] if len(columns) > 1 else []
    lines += [(row.label, [_cell(row, values) for values in columns.values()]) for row in rows]
    lines += [(label, [text]) for label, text in _time_rows(progressed)]
    label_width = min(max(len(label) for label, _ in lines) if lines else 0, width // 3)
    widths = [max(len(cells[n]) for _, cells in lines if n < len(cells)) for n in range(len(columns) or 1)]
    text = [_cut(", ".join(_heading(progressed)), width)]
    for label, cells in lines:
        shown = "".join(f"   {cell:<{of_column}}" for cell, of_column in zip(cells, widths, strict=False))
        text.append(_cut(f"  {_cut(label, label_width):<{label_width}}{shown}".rstrip(), width))
    if is_styled:
        text[0] = BColors.format_colored(text[0], BColors.BOLD)
    return "\n".join(text)


def _line(progressed: Progressed, rows: Sequence[Row], columns: dict[str, dict[str, float]], has_all_rows: bool) -> str:
    shown = rows if has_all_rows else [row for row in rows if row.label == RETURN or row.spread][:2]
    parts = []
    for row in shown or rows[:2]:
        cells = {path: cell for path, values in columns.items() if (cell := _cell(row, values)) != "-"}
        own = cells.pop(TRAINING, "")
        others = ", ".join(f"{path} {cell}".strip() for path, cell in cells.items())
        if own or others:
            parts.append(f"{row.label} {own}{f' ({others})' if own and others else others}")
    head, *more = _heading(progressed)
    return f"{head}: {', '.join([*parts, *filter(None, (progressed.rate,)), *more])}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
