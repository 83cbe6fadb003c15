"""Commands: `--info`, `--report`, `--play`, `--export` and `--shelf` of runs and bundles; `--new-project`."""

from __future__ import annotations

import importlib.util
import json
import keyword
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from maze.cli import run_summary
from maze.cli.hydra_setup import FlagParser, UsageError
from maze.core.errors import CheckpointError, ConfigError, MazeError
from maze.core.utils.config_utils import value_text
from maze.core.utils.files import TEMPORARY_PREFIX, aligned, has_checksum, verify_checksum
from maze.core.utils.stored_config import read_plain_yaml, read_stored_config, read_yaml
from maze.core.wrappers.observation_normalization.normalization_strategies.base import load_statistics
from maze.perception.models.space_config import SpacesConfig
from maze.report.page import Page
from maze.report.progress import PROGRESS_FILE, read_progress
from maze.report.run_page import REPORT_FILE, ReportedRun, run_page, runs_page, trials_section
from maze.serve.bundle import SHELF, PolicyBundle, shelf
from maze.train.utils.run_process import RUNNING, read_record
from maze.utils.tensorboard_reader import read_event_file

# -- --info ------------------------------------------------------------------------------------------------------------


def print_run_info(arguments: Sequence[str]) -> int:
    """Print the description of a run.

    :param arguments: Its directory.
    :return: Exit status: 1 if a file is damaged.
    """
    directory = run_summary.find_run(run_summary.named_directory("--info", arguments, "."))
    print(f"Run in {directory.absolute()}\n", flush=True)
    files = list(checked_files(directory))
    print("\n".join(_describe_run(directory, files)))
    return int(any(problem for *_, problem in files))


def _describe_run(directory: Path, files: Sequence[tuple[str, int, str]]) -> Iterator[str]:
    facts, usable = run_summary.facts_of(directory, Path.cwd()), {name for name, _, problem in files if not problem}
    rows = [("run", facts.title), ("command", run_summary.text_of(directory / run_summary.COMMAND_FILE)), *facts.facts]
    rows += [
        ("state", run_summary.progress_of(directory)),
        ("settings", _problem(directory / run_summary.CONFIG_FILE, read_stored_config)),
    ]
    yield from (f"  {label:<13}{text}" for label, text in rows if text)
    yield "\nFiles"
    for name, size, problem in files:
        yield f"  {name:<60} {size:>12,} B: {f'DAMAGED: {problem}' if problem else 'valid'}"
    yield "\nNext"
    for purpose, command in run_summary.run_commands(directory, Path.cwd(), usable).items():
        yield f"  {purpose}:\n    {command}"


def checked_files(directory: Path) -> Iterator[tuple[str, int, str]]:
    """Read and check all files of a run, at any depth.

    :return: Names relative to the directory, sizes in bytes, and the damage (empty: none was found).
    """
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = path.relative_to(directory).as_posix()
        if path.name.startswith(TEMPORARY_PREFIX):
            name = f"{name} (left by an interrupted write; it can be deleted)"
        reader = next((read for pattern, read in _READERS if path.match(pattern)), Path.read_bytes)
        yield name, path.stat().st_size, _problem(path, reader)


def _problem(path: Path, read: Callable[[Path], object]) -> str:
    """Return the damage of a file that its reader finds; empty: none."""
    try:
        read(path)
    except (MazeError, OSError, ValueError) as error:
        text = " ".join(str(error).split()).replace(f"`{path}`", "it").replace(str(path), "it")
        return text.partition(". ")[0].rstrip(".") or type(error).__name__
    return ""


def _read_events(path: Path) -> None:
    if damage := read_event_file(path).damage:
        raise CheckpointError(damage)


def _read_verified(path: Path) -> None:
    content = path.read_bytes()
    verify_checksum(content, str(path))
    if not has_checksum(content):
        raise CheckpointError(f"{path} is cut off, or was not written by Maze: it has no checksum")


def _read_state(path: Path) -> None:
    from maze.core.utils.checkpoint import load_state  # torch, which the other commands do without

    load_state(path)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


# Pattern and reader of each kind of file; a reader raises an error for a damaged one.
_READERS: tuple[tuple[str, Callable[[Path], object]], ...] = (
    ("*.pt", _read_state),
    ("spaces_config.pkl", SpacesConfig.load),
    ("statistics*.pkl", load_statistics),
    ("trajectory_data/*.pkl", _read_verified),
    ("events.out.tfevents.*", _read_events),
    ("*.yaml", read_yaml),
    ("*.json", _read_json),
)


# -- --report ----------------------------------------------------------------------------------------------------------


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
    places = [
        directory if _runs_in(directory) else run_summary.find_run(directory, "--report") for directory in wanted.runs
    ]
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
    trials = trials_section(places[0]) if len(places) == 1 else None
    if trials is not None:  # without unfinished runs that were repeated
        runs = [run for run in runs if run.name in trials[1] or _state_of(run) == RUNNING] or runs
    reported: list[ReportedRun] = []
    for directory in runs:
        try:
            reported.append(_reported(directory))
        except MazeError as error:  # noqa: PERF203 (the others are reported)
            print(f"Left out: {error}", file=sys.stderr)
    if not reported:
        raise MazeError(f"None of the {len(runs)} runs has statistics that can be read ({PROGRESS_FILE}).")
    title = "" if trials is None else f"Sweep {places[0].name}"
    return runs_page(reported, datetime.now(), title, [] if trials is None else [trials[0]])


def _reported(directory: Path) -> ReportedRun:
    config = read_plain_yaml(directory / run_summary.CONFIG_FILE)
    facts = run_summary.facts_of(directory, Path.cwd())
    return ReportedRun(facts, read_progress(directory), config, _state_of(directory))


def _state_of(directory: Path) -> str:
    return str((read_record(directory) or {}).get("state", ""))


def _runs_in(directory: Path) -> list[Path]:
    """Return the runs of a sweep or of a directory of runs; empty for the directory of one run."""
    if run_summary.is_run(directory) or not directory.is_dir():
        return []
    runs = [path.parent for path in directory.glob(f"*/{run_summary.CONFIG_FILE}")]
    return sorted(runs, key=lambda run: (len(run.name), run.name))


# -- --play ------------------------------------------------------------------------------------------------------------


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


# -- --export ----------------------------------------------------------------------------------------------------------


def export_run(arguments: Sequence[str]) -> int:
    """Write the bundle of a run, and print its content and the code that is not included.

    :param arguments: Arguments of `--export`.
    :return: Exit status.
    :raises UsageError: There is no such run, or an option is unknown.
    """
    parser = FlagParser("--export", "Write a trained policy as one file that acts without torch.")
    parser.add_argument("run", type=Path, help="directory of the training run")
    parser.add_argument("--out", type=Path, help="the file, <run>.maze by default")
    parser.add_argument("--name", help="name of the policy")
    parser.add_argument("--weights", dest="state_dict_file", help="file of the weights, state_dict.pt by default")
    parser.add_argument("--steps", dest="n_steps", type=int, help="number of steps recorded as reference cases")
    parser.add_argument("--seed", type=int, help="seed of these steps")
    settings = vars(parser.parse_intermixed_args(list(arguments)))
    run = run_summary.find_run(settings.pop("run"), "--export")
    out = settings.pop("out", Path(f"{run.absolute().name}.maze"))
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out: there is no directory {out.parent}.")
    print(f"-> exporting {run}", flush=True)
    bundle = PolicyBundle.from_run(run, **settings)
    path = bundle.save(out)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB, SHA-256 {bundle.sha256}")
    for key, step in bundle.steps.items():
        sizes = next(iter(step.networks.values())).state_sizes
        states = f", recurrent state of {', '.join(map(str, sizes.values()))}" if sizes else ""
        print(f"  sub-step {key!r}: from {', '.join(step.observation_space)} to {', '.join(step.heads)}{states}")
    for piece in bundle.card["code"]:
        need = "must be provided" if piece["is_required"] else "may be provided" if piece["call"] else "precedes it"
        print(f"  not in the file: {piece['name']} ({piece['class']}) {need}")
    n_cases = sum(len(next(iter(case["logits"].values()))) for case in bundle.reference)
    print(f"Its logits equal those of the trained policy in {n_cases} recorded states.")
    return 0


# -- --shelf -----------------------------------------------------------------------------------------------------------

SHELF_HEADER = ("name", "problem", "KPI", "policy", "95 % interval", "heuristic", "95 % interval", "kB")


def print_shelf(arguments: Sequence[str]) -> int:
    """Print the bundles that are part of Maze, with the results and commands of their cards.

    :param arguments: Names of bundles; none: all.
    :return: Exit status.
    :raises UsageError: The shelf has no such bundle.
    """
    try:
        bundles = [PolicyBundle.load(f"{SHELF}{name}", check=False) for name in arguments or shelf()]
    except ConfigError as error:
        raise UsageError(f"--shelf: {error}") from error
    print("\n".join(aligned([SHELF_HEADER, *map(shelf_row, bundles)])))
    print("\nUse one: maze-run policy=shelf:<name>. Commands that trained them:")
    for bundle in bundles:
        print(f"  {bundle.card['command']}")
    return 0


def shelf_row(bundle: PolicyBundle) -> tuple[str, ...]:
    """Return the columns of `SHELF_HEADER` for a bundle of the shelf, from its card."""
    facts = bundle.card["shelf"]
    of_policy, of_heuristic = ((f"{mean:.4g}", f"[{low:.4g}, {high:.4g}]") for mean, low, high in facts["results"])
    size = 0 if bundle.path is None else bundle.path.stat().st_size
    heuristic = (f"{facts['heuristic']} {of_heuristic[0]}", of_heuristic[1])
    return bundle.card["name"], facts["problem"], facts["kpi"], *of_policy, *heuristic, f"{size / 1e3:.0f}"


# -- --new-project -----------------------------------------------------------------------------------------------------

USAGE = "maze-run --new-project <name>, for instance --new-project stockroom"
TEMPLATE = "stockroom"
"""Name of the example project."""
LOCAL = "local.mk"
_NAME = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
_TAKEN_IN_PROJECT = frozenset({"conf", "hydra_plugins", "outputs", "tests"})


def write_project(arguments: Sequence[str]) -> int:
    """Write the project into a new directory, and print the next commands.

    :param arguments: Arguments of `--new-project`: the name, or a path that ends with it.
    :return: Exit status.
    :raises UsageError: The name is not valid for a package, or is in use; or the directory is not empty.
    """
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UsageError(f"--new-project: expected one name, found {' '.join(arguments) or 'none'}. {USAGE}")
    directory = Path(arguments[0]).absolute()
    is_empty = directory.is_dir() and not any(directory.iterdir())
    if not directory.parent.is_dir() or (os.path.lexists(directory) and not is_empty):
        raise UsageError(f"--new-project: {directory} must be an empty or a new directory in an existing one.")
    _check_name(directory)
    try:
        _copy(template_directory(), directory)
        (directory / LOCAL).write_text(
            f"# Local to this machine, ignored by git: the Python with Maze.\nPYTHON ?= {sys.executable}\n",
            encoding="utf-8",
        )
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise UsageError(f"--new-project: {directory} cannot be written: {error.strerror or error}.") from error
    print(f"{directory}: a new project. README.md describes its files; `make test` runs its tests, `make demo` trains.")
    return 0


def _check_name(directory: Path) -> None:
    name = directory.name
    if not _NAME.fullmatch(name) or keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise UsageError(
            f"--new-project: {name!r} cannot be the name of a package: expected lower-case letters, digits and "
            f"underscores, beginning with a letter, and no keyword of Python."
        )
    spec = importlib.util.find_spec(name)
    places = () if spec is None else spec.submodule_search_locations or (spec.origin,)
    if name in _TAKEN_IN_PROJECT or any(place is None or Path(place) != directory for place in places):
        raise UsageError(f"--new-project: {name} is the name of an existing package. Choose another name.")


def template_directory() -> Path:
    """Return the directory of the example: in the installed package, or beside it in a checkout."""
    installed = Path(__file__).parent / "project_template"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[2] / "examples" / "own_project"


def _copy(source: Path, target: Path) -> None:
    ignored = (source / ".gitignore").read_text(encoding="utf-8").split()
    for file in sorted(path for path in source.rglob("*") if path.is_file()):  # git leaves empty directories out
        relative = file.relative_to(source)
        if not any(fnmatch(part, pattern) for part in relative.parts for pattern in ignored):
            copied = target / _renamed(str(relative), target.name)
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_text(_renamed(file.read_text(encoding="utf-8"), target.name), encoding="utf-8")


def _renamed(text: str, name: str) -> str:
    title = "".join(part.capitalize() for part in name.split("_"))
    return text.replace(TEMPLATE, name).replace(TEMPLATE.capitalize(), title)
