"""Table of the statistics of a run, `progress.csv`, from which reports are made."""

from __future__ import annotations

import csv
import io
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from maze.core.errors import MazeError
from maze.core.log_stats.log_stats import LogStats
from maze.core.log_stats.stats_format import columns_of, statistic_name
from maze.core.utils.files import csv_text, write_whole

PROGRESS_FILE = "progress.csv"
LEADING = ("step", "path", "seconds", "env_steps")
"""Columns of every row: log step, prefix such as `train`, seconds since the start, environment steps of the run."""
_WHOLE = 2.0**53
_MISSING = math.nan


class StatisticsOfPath:
    """Statistics of one prefix, in columns of equal length; NaN for missing values.

    :param path: The prefix: `train`, `eval` or another.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.steps = array("d")
        self.seconds = array("d")
        self.env_steps = array("d")
        self.columns: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self.steps)

    def append(self, step: float, seconds: float, env_steps: float, values: Mapping[str, float]) -> None:
        """Add a row.

        :param step: Log step.
        :param seconds: Wall time since the start of the run.
        :param env_steps: Number of environment steps since the start of the run.
        :param values: Statistics by name; new names become columns.
        """
        for name in values:
            if name not in self.columns:
                self.columns[name] = array("d", [_MISSING]) * len(self)
        self.steps.append(step)
        self.seconds.append(seconds)
        self.env_steps.append(env_steps)
        for name, column in self.columns.items():
            column.append(values.get(name, _MISSING))


class Progress:
    """The rows of `progress.csv`, collected during a run or read from the file.

    Statistics with the same prefix and log step form one row. Distributions become columns:
    the share of each category (`.../share_2`), or quantiles (`.../p05` to `.../p95`) of real numbers, per component
    of vectors.

    :param columns: Initial columns of statistics, in this order.
    """

    def __init__(self, columns: Iterable[str] = ()) -> None:
        self.paths: dict[str, StatisticsOfPath] = {}
        # Index of the column of each statistic, in order of the first occurrence.
        self._columns = {name: position for position, name in enumerate(columns)}
        # Completed rows as text, with their numbers of columns.
        self._lines: list[tuple[int, str]] = []
        self._open: dict[str, tuple[int, float, float, dict[str, float]]] = {}

    def add(self, path: str | None, step: int, seconds: float, env_steps: float | None, stats: LogStats) -> None:
        """Add statistics to the row of the log step; :meth:`finish_step` completes it.

        :param path: Their prefix.
        :param step: Number of the log step.
        :param seconds: Seconds since the start of the run.
        :param env_steps: Environment steps of the run; `None`: unknown.
        :param stats: The statistics.
        """
        values = self._open[path or ""][3] if (path or "") in self._open else {}
        for key, value in stats.items():
            values.update(columns_of(statistic_name(key), value))
        self._open[path or ""] = (step, seconds, _MISSING if env_steps is None else float(env_steps), values)

    def finish_step(self) -> None:
        """Complete the rows of the log step."""
        for path, (step, seconds, env_steps, values) in self._open.items():
            self.append(path, step, seconds, env_steps, values)
        self._open.clear()

    @property
    def n_rows(self) -> int:
        """Number of completed rows."""
        return len(self._lines)

    def text(self) -> str:
        """Return the completed rows as CSV."""
        head = csv_text([[*LEADING, *self._columns]])
        n_columns = len(self._columns)
        return "".join([head, *(f"{line}{',' * (n_columns - n)}\n" for n, line in self._lines)])

    def write(self, directory: Path) -> None:
        """Write the completed rows into `progress.csv` atomically.

        :param directory: Directory of the file.
        :raises OSError: It cannot be written.
        """
        write_whole(directory / PROGRESS_FILE, self.text())

    def take_over(self, earlier: Progress, step: float, path: str) -> float:
        """Insert the rows of the resumed run before all others.

        :param earlier: Table of the resumed run.
        :param step: First log step of this run.
        :param path: First prefix of this run; rows of the earlier run before it in this log step stay.
        :return: Seconds of the last of these rows.
        """
        before = list(earlier.paths).index(path) if path in earlier.paths else len(earlier.paths)
        same_step = list(earlier.paths)[:before]
        last = 0.0
        for each, number, seconds, env_steps, values in earlier.rows():
            if number < step or (number == step and each in same_step):
                self.append(each, number, seconds, env_steps, values)
                last = max(last, seconds)
        return last

    def rows(self) -> Iterator[tuple[str, float, float, float, dict[str, float]]]:
        """Yield prefix, log step, seconds, environment steps and statistics of each row, by log step."""
        rows = [
            (statistics.steps[index], position, index, statistics)
            for position, statistics in enumerate(self.paths.values())
            for index in range(len(statistics))
        ]
        for step, _, index, statistics in sorted(rows, key=lambda row: row[:3]):
            values = {name: column[index] for name, column in statistics.columns.items()}
            present = {name: value for name, value in values.items() if not math.isnan(value)}
            yield statistics.path, step, statistics.seconds[index], statistics.env_steps[index], present

    def append(self, path: str, step: float, seconds: float, env_steps: float, values: Mapping[str, float]) -> None:
        """Add a row.

        :param path: Prefix of the statistics: `train`, `eval` or another.
        :param step: Log step.
        :param seconds: Wall time since the start of the run.
        :param env_steps: Number of environment steps since the start of the run.
        :param values: Statistics by name; new names become columns.
        """
        self.paths.setdefault(path, StatisticsOfPath(path)).append(step, seconds, env_steps, values)
        for name in values:
            self._columns.setdefault(name, len(self._columns))
        prefix = csv_text([[path]]).removesuffix("\n") if path else ""
        cells = [_text(step), prefix, _text(round(seconds, 3)), _text(env_steps)]
        last = max((self._columns[name] for name in values), default=-1)
        statistics = [""] * (last + 1)
        for name, value in values.items():
            statistics[self._columns[name]] = _text(value) or "nan"
        self._lines.append((last + 1, ",".join([*cells, *statistics])))


def read_progress(directory: Path) -> Progress:
    """Read `progress.csv`; truncated or damaged lines are skipped.

    :param directory: The run directory.
    :raises MazeError: There is no such file, or it has another format.
    """
    file = directory / PROGRESS_FILE
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise MazeError(
            f"{file} cannot be read ({error.strerror}). A training run writes it at the end of its first epoch."
        ) from error
    try:
        header, *rows = list(csv.reader(io.StringIO(text.replace("\0", "")))) or [[]]
    except csv.Error as error:
        raise MazeError(f"{file} is not the table of a training run: {error}.") from error
    if tuple(header[: len(LEADING)]) != LEADING:
        raise MazeError(f"{file} is not the table of a training run: expected the columns {', '.join(LEADING)}, ....")
    names = header[len(LEADING) :]
    progress = Progress(names)
    for row in rows:
        numbers = list(map(_number, row))
        if len(row) < len(LEADING) or numbers[0] is None:
            continue
        step, _, seconds, env_steps, *found = numbers
        values = {name: value for name, value in zip(names, found, strict=False) if value is not None}
        progress.append(row[1], step or 0.0, seconds or 0.0, _MISSING if env_steps is None else env_steps, values)
    return progress


def _text(value: float) -> str:
    """Format a number as the shortest text with the same value; empty: NaN."""
    if math.isnan(value):
        return ""
    return str(int(value)) if -_WHOLE < value < _WHOLE and value == int(value) else repr(float(value))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
