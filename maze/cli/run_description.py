"""Description of a run or a sweep (`--info`): facts, checked files, and commands that use it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from maze.cli.run_info import COMMAND_FILE, CONFIG_FILE, find_run, is_sweep, shown_path, text_of
from maze.cli.run_summary import PROGRESS_OF_RLLIB, command_text, facts_of, progress_of, run_commands, stored_overrides
from maze.cli.sweeps.results import RESULTS_FILE, STUDY_FILE
from maze.core.errors import CheckpointError, MazeError
from maze.core.utils.checkpoint import load_state
from maze.core.utils.files import TEMPORARY_PREFIX, is_sealed, open_seal
from maze.core.utils.stored_config import read_stored_config, read_yaml
from maze.core.wrappers.observation_normalization.normalization_strategies.base import load_statistics
from maze.perception.models.space_config import SpacesConfig
from maze.utils.tensorboard_reader import read_event_file


def print_run_info(arguments: Sequence[str]) -> int:
    """Print the description of a run or a sweep.

    :param arguments: Its directory.
    :return: Exit status: 1 if a file is damaged.
    """
    directory = find_run(Path(*arguments))
    if is_sweep(directory):
        print("\n".join(_describe_sweep(directory)))
        return 0
    files = list(checked_files(directory))
    print("\n".join(_describe_run(directory, files)))
    return int(any(file.problem for file in files))


def _describe_run(directory: Path, files: Sequence[CheckedFile]) -> Iterator[str]:
    facts, usable = facts_of(directory, Path.cwd()), {file.name for file in files if not file.problem}
    rows = [("run", facts.title), ("command", text_of(directory / COMMAND_FILE)), *facts.facts]
    rows += [("state", progress_of(directory)), ("settings", _problem(directory / CONFIG_FILE, read_stored_config))]
    yield f"Run in {directory.absolute()}\n"
    yield from (_row(label, text) for label, text in rows if text)
    yield "\nFiles"
    yield from (file.line() for file in files)
    yield "\nNext"
    for purpose, command in run_commands(directory, Path.cwd(), usable).items():
        yield f"  {purpose}:\n    {command}"


def _row(label: str, text: str) -> str:
    return f"  {label:<13}{text}"


def _describe_sweep(directory: Path) -> Iterator[str]:
    runs = sorted((run.parent for run in directory.glob(f"*/{CONFIG_FILE}")), key=lambda run: (len(run.name), run.name))
    shown = shown_path(directory, Path.cwd())
    yield f"Sweep in {directory.absolute()}\n"
    yield _row("runs", str(len(runs)))
    yield from (_row(run.name, " ".join(stored_overrides(run)) or "(no overrides)") for run in runs)
    yield "\nNext"
    if (directory / RESULTS_FILE).is_file():
        yield f"  Results of all runs: {shown / RESULTS_FILE}"
    if runs:
        yield f"  Describe a single run:\n    {command_text('--info', str(shown / runs[0].name))}"
    if (directory / STUDY_FILE).is_file():
        yield f"  Resume the sweep: the same command with hydra.sweep.dir={shlex.quote(str(shown))}"
    yield f"  Write its report:\n    {command_text('--report', str(shown))}"


# -- the files of a run ------------------------------------------------------------------------------------------------


class CheckedFile(NamedTuple):
    """A file with the result of its check.

    :param name: Relative to the directory of the run.
    :param size: In bytes.
    :param problem: The damage; empty: none was found.
    """

    name: str
    size: int
    problem: str = ""

    def line(self) -> str:
        """Return the file as a line of a table."""
        return f"  {self.name:<60} {self.size:>12,} B: {f'DAMAGED: {self.problem}' if self.problem else 'valid'}"


def checked_files(directory: Path) -> Iterator[CheckedFile]:
    """Read and check all files of a run, at any depth."""
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = path.relative_to(directory).as_posix()
        if path.name.startswith(TEMPORARY_PREFIX):
            name = f"{name} (left by an interrupted write; it can be deleted)"
        reader = next((read for pattern, read in _READERS if path.match(pattern)), Path.read_bytes)
        yield CheckedFile(name, path.stat().st_size, _problem(path, reader))


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


def _read_sealed(path: Path) -> None:
    content = path.read_bytes()
    open_seal(content, str(path))
    if not is_sealed(content):
        raise CheckpointError(f"{path} is cut off, or was not written by Maze: it has no checksum")


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


_READERS: tuple[tuple[str, Callable[[Path], object]], ...] = (
    ("*.pt", load_state),
    ("spaces_config.pkl", SpacesConfig.load),
    ("statistics*.pkl", load_statistics),
    ("trajectory_data/*.pkl", _read_sealed),
    ("events.out.tfevents.*", _read_events),
    ("*.yaml", read_yaml),
    ("versions.json", _read_json),
    ("run.json", _read_json),
    (PROGRESS_OF_RLLIB, _read_json),
)
"""Pattern and reader of each kind of file; a reader raises an error for a damaged one."""
