"""`maze-run --report <run> ...`: a page about runs, made anew from what they have left behind."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from maze.cli.errors import UsageError
from maze.cli.run_description import find_run
from maze.cli.run_facts import facts_of
from maze.report.page import Page
from maze.report.progress import read_progress
from maze.report.run_page import REPORT_FILE, run_page
from maze.report.served_page import serve
from maze.train.utils.training_record import read_record

USAGE = "maze-run --report <run> [<run> ...] [--output <file>] [--live]"


class _Wanted(NamedTuple):
    directories: list[Path]
    output: Path | None
    is_live: bool


def make_report(arguments: Sequence[str]) -> int:
    """Writes the page about runs, or serves it on this machine for as long as somebody looks at it.

    :param arguments: What follows `--report`.
    :return: Exit status.
    :raises UsageError: There is no such run, or no run is named.
    """
    wanted = _parsed(arguments)
    directories = [find_run(directory, "--report") for directory in wanted.directories]
    if wanted.is_live:
        serve(lambda: _page(directories))
        return 0
    path = wanted.output or directories[0] / REPORT_FILE
    _page(directories).write(path)
    print(f"The report is in {path}; open it in a browser.")
    return 0


def _page(directories: Sequence[Path]) -> Page:
    (run,) = directories
    record = read_record(run) or {}
    return run_page(facts_of(run, Path.cwd()), read_progress(run), str(record.get("state", "")), datetime.now())


def _parsed(arguments: Sequence[str]) -> _Wanted:
    directories: list[Path] = []
    output, is_live = None, False
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if argument == "--live":
            is_live = True
        elif name == "--output":
            if not equals and not rest:
                raise UsageError(f"--output: name the file of the page. {USAGE}")
            output = Path(value if equals else rest.pop(0))
        elif argument.startswith("-"):
            raise UsageError(f"--report: {argument} is not known here. {USAGE}")
        else:
            directories.append(Path(argument))
    if not directories:
        raise UsageError(f"--report: name the directory of a run, of a sweep, or of several runs. {USAGE}")
    return _Wanted(directories, output, is_live)
