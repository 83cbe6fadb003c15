"""`maze-run --report <run> ...`: a page about runs, made anew from what they have left behind."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from maze.cli.errors import UsageError
from maze.cli.report_details import episode_command, with_details
from maze.cli.run_description import find_run, is_run
from maze.cli.run_facts import facts_of
from maze.cli.run_info import CONFIG_FILE
from maze.cli.run_list import record_of
from maze.core.errors import MazeError
from maze.core.utils.stored_run import read_plain_yaml
from maze.report.page import Page
from maze.report.progress import PROGRESS_FILE, read_progress
from maze.report.run_page import REPORT_FILE, run_page
from maze.report.runs_page import ReportedRun, runs_page
from maze.report.served_page import serve
from maze.report.sweep_sections import read_trials, sweep_sections

USAGE = "maze-run --report <run> [<run> ...] [--output <file>] [--episode] [--live]"


class _Wanted(NamedTuple):
    directories: list[Path]
    output: Path | None
    is_live: bool
    has_episode: bool


def make_report(arguments: Sequence[str]) -> int:
    """Writes the page about runs, or serves it on this machine for as long as somebody looks at it.

    :param arguments: What follows `--report`.
    :return: Exit status.
    :raises UsageError: There is no such run, or no run is named.
    """
    wanted = _parsed(arguments)
    places = [directory if _runs_in(directory) else find_run(directory, "--report") for directory in wanted.directories]
    if wanted.is_live:
        serve(lambda: _page(places, is_quick=True))
        return 0
    path = wanted.output or places[0] / REPORT_FILE
    _page(places).write(path)
    print(f"The report is in {path}; open it in a browser.")
    return 0


def episode_wanted(arguments: Sequence[str]) -> list[str] | None:
    """The command that plays an episode for the report, if one is asked for and there is none.

    :param arguments: What follows `--report`.
    """
    wanted = _parsed(arguments)
    return episode_command(find_run(wanted.directories[0], "--report")) if wanted.has_episode else None


def _page(places: Sequence[Path], is_quick: bool = False) -> Page:
    """The page about what lies in directories of runs, of sweeps, or of several runs.

    :param is_quick: Leave out what takes a moment to find out: a page that is served is made every few seconds.
    """
    runs = [run for place in places for run in (_runs_in(place) or [place])]
    trials = read_trials(places[0]) if len(places) == 1 else None
    if runs == list(places) and len(runs) == 1:
        run = _reported(runs[0])
        facts = run.facts if is_quick else with_details(run.facts, runs[0])
        return run_page(facts, run.progress, run.state, datetime.now())
    reported = [run for run in map(_reported_if_readable, runs) if run is not None]
    if not reported:
        raise MazeError(f"None of the {len(runs)} runs has statistics that can be read ({PROGRESS_FILE}).")
    title = f"Sweep {places[0].name}" if trials is not None else ""
    return runs_page(reported, datetime.now(), title, [] if trials is None else sweep_sections(trials))


def _reported(directory: Path) -> ReportedRun:
    state = str((record_of(directory) or {}).get("state", ""))
    config = read_plain_yaml(directory / CONFIG_FILE)
    return ReportedRun(facts_of(directory, Path.cwd()), read_progress(directory), config, state)


def _reported_if_readable(directory: Path) -> ReportedRun | None:
    try:
        return _reported(directory)
    except MazeError as error:
        print(f"Left out: {error}", file=sys.stderr)
        return None


def _runs_in(directory: Path) -> list[Path]:
    """The runs of a sweep, or those that lie beside each other in a directory that is none itself."""
    if is_run(directory) or not directory.is_dir():
        return []
    runs = [path.parent for path in directory.glob(f"*/{CONFIG_FILE}")]
    return sorted(runs, key=lambda run: (len(run.name), run.name))


def _parsed(arguments: Sequence[str]) -> _Wanted:
    directories: list[Path] = []
    output, is_live, has_episode = None, False, False
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if argument == "--live":
            is_live = True
        elif argument == "--episode":
            has_episode = True
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
    if has_episode and len(directories) > 1:
        raise UsageError(f"--episode: belongs to the report of one run. {USAGE}")
    return _Wanted(directories, output, is_live, has_episode)
