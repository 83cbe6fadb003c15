"""The files of a run: what they are for, and whether they are whole."""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maze.core.errors import MazeError
from maze.core.utils.files import TEMPORARY_PREFIX

_DIRECTORIES = {
    "trajectory_data": "trajectories",
    "trajectory_parquet": "episodes as tables",
    "event_logs": "tables of events",
    "action_records": "recorded actions",
    "rendering": "pictures",
    "rllib_checkpoints": "files of Ray's checkpoints",
    "rllib_results": "TensorBoard statistics of RLlib",
}
_N_CHECKED_PER_DIRECTORY = 100
_PICKLE, _ZIP = b"\x80", b"PK"


@dataclass(frozen=True)
class CheckedFile:
    """A file (or a directory of files) and its state.

    :param name: Relative to the directory of the run.
    :param size: In bytes.
    :param kind: What it is.
    :param problem: What is wrong with it; None: nothing.
    :param content: The state of the training, where the file holds it.
    """

    name: str
    size: int
    kind: str
    problem: str | None = None
    content: Mapping[str, Any] | None = None

    def line(self) -> str:
        """A line of a table."""
        state = f"DAMAGED: {self.problem}" if self.problem else "valid"
        return f"  {self.name:<40} {_size(self.size):>9}  {self.kind}: {state}"


def checked_files(directory: Path) -> list[CheckedFile]:
    """All files in the directory of a run that matter, read and checked."""
    files = [_checked(path) for path in sorted(directory.iterdir()) if path.is_file() and not path.name.startswith(".")]
    folders = [_checked_folder(directory / name, kind) for name, kind in _DIRECTORIES.items()]
    leftovers = [
        CheckedFile(path.name, path.stat().st_size, "left behind by a write that was interrupted; it can be deleted")
        for path in sorted(directory.glob(f"{TEMPORARY_PREFIX}*"))
    ]
    return [*files, *(folder for folder in folders if folder is not None), *leftovers]


def _checked(path: Path) -> CheckedFile:
    size = path.stat().st_size
    for pattern, kind, check in _CHECKS:
        if path.match(pattern):
            try:
                found, content = check(path)
            except (MazeError, OSError) as error:
                return CheckedFile(path.name, size, kind, _first_sentence(error, path))
            return CheckedFile(path.name, size, found or kind, None, content)
    return CheckedFile(path.name, size, "other file (not checked)")


_Check = Callable[[Path], tuple[str | None, Mapping[str, Any] | None]]
"""Raises a :class:`MazeError` for a damaged file; else what it is (None: as named), and the state of a training."""


def _checkpoint(path: Path) -> tuple[str | None, Mapping[str, Any] | None]:
    from maze.core.utils.checkpoint import load_state
    from maze.train.utils.plain_state import STATE_FORMAT

    state = load_state(path)
    if STATE_FORMAT in state:
        return f"state of the training after epoch {state.get('epoch', '?')}", state
    return ("weights of the best model" if path.name == "state_dict.pt" else "weights"), None


def _spaces(path: Path) -> tuple[str | None, Mapping[str, Any] | None]:
    from maze.perception.models.space_config import SpacesConfig

    SpacesConfig.load(path)
    return None, None


def _statistics(path: Path) -> tuple[str | None, Mapping[str, Any] | None]:
    from maze.core.wrappers.observation_normalization.statistics_file import load_statistics

    load_statistics(path)
    return None, None


def _events(path: Path) -> tuple[str | None, Mapping[str, Any] | None]:
    from maze.core.log_stats.event_file import read_event_file

    content = read_event_file(path)
    if content.n_damaged:
        raise MazeError(
            f"{content.n_lost_bytes} bytes in {content.n_damaged} places cannot be read; {len(content.events)} records "
            "can."
        )
    return f"TensorBoard statistics, {len(content.events)} records", None


def _yaml(path: Path) -> tuple[str | None, Mapping[str, Any] | None]:
    from maze.core.utils.stored_config import read_yaml

    read_yaml(path)
    return None, None


def _json(path: Path) -> tuple[str | None, Mapping[str, Any] | None]:
    import json

    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MazeError(f"it is no JSON file ({error}).") from error
    return None, None


def _plain(path: Path) -> tuple[str | None, Mapping[str, Any] | None]:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MazeError("it is no text.") from error
    return None, None


_CHECKS: tuple[tuple[str, str, _Check], ...] = (
    ("*.pt", "checkpoint", _checkpoint),
    ("spaces_config.pkl", "action and observation spaces", _spaces),
    ("statistics*.pkl", "statistics for observation normalization", _statistics),
    ("events.out.tfevents.*", "TensorBoard statistics", _events),
    ("*.yaml", "settings", _yaml),
    ("versions.json", "versions", _json),
    ("run.json", "how far the training is", _json),
    ("progress.csv", "table of all statistics", _plain),
    ("report.html", "report, for a browser", _plain),
    ("rllib_progress.json", "progress of the training", _json),
    ("command.txt", "command", _plain),
)


def _checked_folder(directory: Path, kind: str) -> CheckedFile | None:
    if not directory.is_dir():
        return None
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    damaged = [path.name for path in paths[:_N_CHECKED_PER_DIRECTORY] if not _is_whole(path)]
    size = sum(path.stat().st_size for path in paths)
    unchecked = f", the first {_N_CHECKED_PER_DIRECTORY} checked" if len(paths) > _N_CHECKED_PER_DIRECTORY else ""
    problem = f"{len(damaged)} of them, {', '.join(damaged[:3])}" if damaged else None
    return CheckedFile(f"{directory.name}/", size, f"{len(paths)} {kind}{unchecked}", problem)


def _is_whole(path: Path) -> bool:
    """Whether a pickle or an archive is complete; nothing in it is executed. Other files pass."""
    try:
        content = path.read_bytes()
        if content.startswith(_ZIP):
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                return archive.testzip() is None
        if content.startswith(_PICKLE):
            for _ in pickletools.genops(content):
                pass
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, UnicodeDecodeError, IndexError):
        return False
    return bool(content)


def _first_sentence(error: BaseException, path: Path) -> str:
    text = " ".join(str(error).split()).replace(f"`{path}`", "it").replace(str(path), "it")
    return next(_sentences(text), type(error).__name__)


def _sentences(text: str) -> Iterator[str]:
    for sentence in text.split(". "):
        if sentence:
            yield sentence.rstrip(".")


def _size(n_bytes: int) -> str:
    size = float(n_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError("unreachable")
