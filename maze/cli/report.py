"""HTML reports of runs (`maze-run --report <run> ...`) and episodes of a policy (`maze-run --play <run>`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from maze.cli.hydra_setup import FlagParser
from maze.cli.run_summary import CONFIG_FILE, facts_of, find_run, is_run, record_of
from maze.core.errors import MazeError
from maze.core.utils.config_utils import value_text
from maze.core.utils.stored_config import read_plain_yaml
from maze.report.page import Page
from maze.report.progress import PROGRESS_FILE, read_progress
from maze.report.run_page import REPORT_FILE, ReportedRun, run_page, runs_page, trials_section


def make_report(arguments: Sequence[str]) -> int:
    """Write the report of runs.

    :param arguments: Arguments of `--report`.
    :return: Exit status.
    :raises UsageError: No run is named, or it does not exist.
    """
    parser = FlagParser("--report", "Write the report of a run, a sweep, or several runs.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="run", help="directory of a run, of a sweep, or of runs")
    parser.add_argument("--output", type=Path, default=None, help="file, report.html there or, for several, here")
    wanted = parser.parse_intermixed_args(list(arguments))
    places = [directory if _runs_in(directory) else find_run(directory, "--report") for directory in wanted.runs]
    path = wanted.output or (places[0] if len(places) == 1 else Path()) / REPORT_FILE
    _page(places).write(path)
    print(f"The report is in {path}; open it in a browser.")
    return 0


def _page(places: Sequence[Path]) -> Page:
    """Return the report of a run, a sweep or several runs."""
    runs = [run for place in places for run in (_runs_in(place) or [place])]
    if runs == list(places) and len(runs) == 1:
        run = _reported(runs[0])
        return run_page(run.facts, run.progress, run.state, datetime.now())
    reported: list[ReportedRun] = []
    for directory in runs:
        try:
            reported.append(_reported(directory))
        except MazeError as error:  # noqa: PERF203 (the others are reported)
            print(f"Left out: {error}", file=sys.stderr)
    if not reported:
        raise MazeError(f"None of the {len(runs)} runs has statistics that can be read ({PROGRESS_FILE}).")
    trials = trials_section(places[0]) if len(places) == 1 else None
    title = "" if trials is None else f"Sweep {places[0].name}"
    return runs_page(reported, datetime.now(), title, [] if trials is None else [trials])


def _reported(directory: Path) -> ReportedRun:
    state = str((record_of(directory) or {}).get("state", ""))
    config = read_plain_yaml(directory / CONFIG_FILE)
    return ReportedRun(facts_of(directory, Path.cwd()), read_progress(directory), config, state)


def _runs_in(directory: Path) -> list[Path]:
    """Return the runs of a sweep or of a directory of runs; empty for the directory of one run."""
    if is_run(directory) or not directory.is_dir():
        return []
    runs = [path.parent for path in directory.glob(f"*/{CONFIG_FILE}")]
    return sorted(runs, key=lambda run: (len(run.name), run.name))


def play_command(arguments: Sequence[str]) -> list[str]:
    """Return the command that shows an episode of a policy: in a window, as an HTML player, or as a video.

    :param arguments: Arguments of `--play`: the directory of a training run, `--video`, overrides.
    :raises UsageError: The run or the file of the video is missing.
    """
    parser = FlagParser("--play", "Show an episode of the best policy of a training run.")
    parser.add_argument("run", help="directory of the training run: outputs/<name>/<time>")
    parser.add_argument("--video", type=Path, default=None, help="write a video: episode.mp4 or .gif")
    wanted, further = parser.parse_known_args(list(arguments))
    if wanted.video is not None:
        named = [f"policies=[{value_text(wanted.run)}]", f"runner.video={value_text(wanted.video.absolute())}"]
        return ["-cn", "conf_inspect", *named, *further]
    from maze.core.rollout.recording import has_display

    shown = has_display()
    return [
        "policy=torch_policy",
        f"input_dir={value_text(wanted.run)}",
        "runner=sequential",
        "runner.n_episodes=1",
        "runner.max_episode_steps=0",
        "runner.deterministic=true",
        "runner.record_event_logs=false",
        f"runner.render={str(shown).lower()}",
        "runner.record_trajectory=false",
        f"runner.record_pages={str(not shown).lower()}",
        *further,
    ]
