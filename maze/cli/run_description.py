"""Description of a run or a sweep (`--info`): components, progress, checked files, and commands that use it."""

from __future__ import annotations

import io
import json
import pickletools
import shlex
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from maze.cli.run_directory import environment_option
from maze.cli.run_info import (
    COMMAND_FILE,
    CONFIG_FILE,
    HYDRA_CONFIG,
    VERSIONS_FILE,
    find_run,
    installed_versions,
    is_sweep,
    shown_path,
    stored_arguments,
    text_of,
)
from maze.cli.run_summary import (
    PROGRESS_OF_RLLIB,
    again_command,
    command_text,
    record_of,
    resume_command,
    seeds_text,
    stored_overrides,
    stored_versions,
)
from maze.cli.sweeps.results import RESULTS_FILE, STUDY_FILE
from maze.core.errors import CheckpointError, MazeError
from maze.core.utils.checkpoint import load_state
from maze.core.utils.config_utils import gym_env_defaults
from maze.core.utils.files import TEMPORARY_PREFIX
from maze.core.utils.stored_config import read_stored_config, read_yaml
from maze.core.utils.stored_run import chosen_options
from maze.core.wrappers.observation_normalization.normalization_strategies.base import load_statistics
from maze.perception.models.space_config import SpacesConfig
from maze.train.utils.plain_state import STATE_FORMAT
from maze.train.utils.training_record import ENDED
from maze.utils.tensorboard_reader import read_event_file

# -- the description ---------------------------------------------------------------------------------------------------


def print_run_info(arguments: Sequence[str]) -> int:
    """Print the description of a run or a sweep.

    :param arguments: Its directory.
    :return: Exit status: 1 if a file is damaged.
    """
    directory = find_run(Path(*arguments))
    if is_sweep(directory):
        print("\n".join(_describe_sweep(directory)))
        return 0
    files = checked_files(directory)
    print("\n".join(_describe_run(directory, files)))
    return int(any(file.problem for file in files))


def _describe_run(directory: Path, files: Sequence[CheckedFile]) -> list[str]:
    cfg, problem = _stored_config(directory)
    lines = [f"Run in {directory.absolute()}", ""]
    rows = [("kind", _kind(cfg)), ("command", text_of(directory / COMMAND_FILE)), *_times_and_versions(directory)]
    rows.append(("settings", problem))
    if cfg is not None:
        rows += [*_components(cfg, chosen_options(directory)), *_progress(directory, cfg, files)]
    lines += [_row(label, text) for label, text in rows if text]
    lines += ["", "Files", *([file.line() for file in files] or ["  (none)"])]
    return [*lines, "", "Next", *_next_commands(directory, cfg, files)]


def _row(label: str, text: str) -> str:
    return f"  {label:<13}{text}"


def _stored_config(directory: Path) -> tuple[DictConfig | None, str]:
    """Return the configuration of the run, or the reason why it cannot be read."""
    for name in (Path(CONFIG_FILE), HYDRA_CONFIG):  # only the former has randomly chosen seeds
        path = directory / name
        if not path.is_file():
            continue
        try:
            return OmegaConf.create(read_stored_config(path).value()), ""
        except CheckpointError as error:
            return None, str(error)
    return None, f"{HYDRA_CONFIG} is missing"


def _kind(cfg: DictConfig | None) -> str:
    if cfg is None:
        return "unknown"
    if _is_rllib(cfg):
        return "training with RLlib"
    if "algorithm" in cfg:
        return "training"
    target = OmegaConf.select(cfg, "runner._target_") or "?"
    return f"rollout ({target})" if "policy" in cfg else f"{target}"


def _is_rllib(cfg: DictConfig) -> bool:
    """Return whether it is a training run with RLlib, which has Ray's checkpoints instead of latest.pt."""
    return str(OmegaConf.select(cfg, "runner._target_") or "").startswith("maze.rllib.")


def _times_and_versions(directory: Path) -> Iterator[tuple[str, str]]:
    stamps = [path.stat().st_mtime for path in directory.iterdir() if path.is_file()]
    if stamps:
        first, last = (f"{datetime.fromtimestamp(stamp):%Y-%m-%d %H:%M:%S}" for stamp in (min(stamps), max(stamps)))
        yield "time", f"first file {first}, last change {last}"
    found = stored_versions(directory)
    if found is None:
        yield "versions", f"{VERSIONS_FILE} is damaged"
        return
    versions, commit = found
    now = installed_versions()
    yield (
        "versions",
        ", ".join(
            f"{name} {version}" + (f" (now {now.get(name)})" if now.get(name) != version else "")
            for name, version in versions.items()
            if version and name != "platform"
        ),
    )
    yield "git", commit


def _components(cfg: DictConfig, choices: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    plain: Any = OmegaConf.to_container(cfg)
    for group in ("env", "wrappers", "algorithm", "model", "critic", "policy", "runner"):
        choice, section = choices.get(group) or choices.get(f"rllib/{group}"), plain.get(group)
        if group == "critic" and OmegaConf.select(cfg, "model.critic") != OmegaConf.select(cfg, "critic"):
            continue  # the model has its own critic
        details: list[str] = []
        if isinstance(section, dict) and group == "wrappers":
            details = [str(name).rpartition(".")[2] for name in section]
        elif isinstance(section, dict) and section.get("_target_") and not (group == "algorithm" and choice):
            details = [str(section["_target_"])]
        if isinstance(section, dict) and group == "env":
            option, choice = choice, environment_option(choice, section)
            left_over = gym_env_defaults() if choice != option else {}  # arguments of the default environment
            details += [
                f"{key!s}={value}"
                for key, value in section.items()
                if key != "_target_" and not isinstance(value, (dict, list)) and value not in (None, "???")
                if value != left_over.get(str(key), ...)
            ]
        if choice or details:
            yield group, f"{choice or '(own)'}{': ' if details else ''}{', '.join(details)}"
    yield "seeds", seeds_text(plain)


def _progress(directory: Path, cfg: DictConfig, files: Sequence[CheckedFile]) -> Iterator[tuple[str, str]]:
    """Yield state, progress and best score of a training run."""
    if "algorithm" not in cfg:
        return
    record = record_of(directory) or {}
    steps, score = record.get("n_env_steps"), record.get("best_score")
    if record:
        yield "state", f"{record.get('state')}{f', {steps:,} environment steps' if isinstance(steps, int) else ''}"
    is_rllib, state = _is_rllib(cfg), _state_in(files)
    if is_rllib and not record:
        yield "progress", f"unknown: there is no {PROGRESS_OF_RLLIB}; it is written with Ray's first checkpoint"
    elif not is_rllib and state is None:
        yield "progress", "unknown: there is no readable latest.pt; it is written at the end of the first epoch"
    else:
        is_ended = record.get("state") == ENDED if state is None else state.get("is_finished")
        total = None if is_rllib else OmegaConf.select(cfg, "algorithm.n_epochs")
        done = f"{(state or record).get('epoch', '?')}{f' of {total}' if total else ''}"
        end = "the run has ended" if is_ended else "the run stopped early"
        yield "progress", f"{done} {'iterations' if is_rllib else 'epochs'} done, {end}"
    if isinstance(score, int | float):
        violation = record.get("violation")
        yield "best score", f"{score:.5g}{f', constraints broken by {violation:.5g}' if violation else ''}"


def _state_in(files: Sequence[CheckedFile]) -> Mapping[str, Any] | None:
    return next((file.state for file in files if file.state is not None), None)


def _next_commands(directory: Path, cfg: DictConfig | None, files: Sequence[CheckedFile]) -> list[str]:
    if cfg is None:
        return ["  There are no commands without the run's configuration."]
    usable = {file.name for file in files if not file.problem}
    state = _state_in(files) or {}
    n_finished = int(state.get("epoch", 0)) if state.get("is_finished") else None
    arguments, shown = stored_arguments(directory), shown_path(directory, Path.cwd())
    lines: list[str] = []
    if "algorithm" in cfg:
        if "latest.pt" in usable:
            title = "Train on, for as many epochs again" if n_finished else "Resume the run"
            lines += [f"  {title}:", f"    {resume_command(arguments, cfg, shown, n_finished)}"]
        needed = ["state_dict.pt", "spaces_config.pkl"]
        if usable.issuperset(needed):
            lines += ["  Roll the best policy out:", f"    {_rollout_command(arguments, shown)}"]
        missing = [name for name in (needed if _is_rllib(cfg) else ["latest.pt", *needed]) if name not in usable]
        if missing:
            lines.append(f"  Missing or damaged, and required for further commands: {', '.join(missing)}.")
            others = sorted(name for name in usable if name.endswith(".pt") and name not in missing)
            lines += [f"  Readable checkpoints: {', '.join(others)}."] if others else []
    else:
        lines += ["  Run it again:", f"    {again_command(arguments)}"]
    if "progress.csv" in usable:
        lines += ["  Write its report:", f"    {command_text('--report', str(shown))}"]
    if any(file.name.startswith("events.out.tfevents") for file in files):
        lines += ["  Show its statistics:", f"    tensorboard --logdir {shlex.quote(str(shown))}"]
    return lines


def _rollout_command(arguments: Sequence[str], directory: Path) -> str:
    """Return the command that rolls the best policy out in the environment and wrappers of its training run.

    The rollout reads them from the directory. The command repeats the overrides that name them, so that the user's own
    code is trusted. With an experiment or another root configuration, these overrides are only a part of the
    environment's configuration and are left out.
    """
    flags: list[str] = []
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if flag.partition("=")[0] in ("-cd", "--config-dir"):
            flags += [flag] if "=" in flag else [flag, value]
    is_all = "conf_train" in arguments and not any("experiment=" in argument for argument in arguments)
    sections = ("trusted_packages=", *(("env=", "env.", "wrappers") if is_all else ()))
    named = [argument for argument in arguments if argument.lstrip("+~").startswith(sections)]
    return command_text(*flags, *named, "policy=torch_policy", f"input_dir={directory}")


def _describe_sweep(directory: Path) -> list[str]:
    runs = sorted((run.parent for run in directory.glob(f"*/{CONFIG_FILE}")), key=lambda run: (len(run.name), run.name))
    shown = shown_path(directory, Path.cwd())
    lines = [f"Sweep in {directory.absolute()}", "", _row("runs", str(len(runs)))]
    lines += [_row(run.name, " ".join(stored_overrides(run)) or "(no overrides)") for run in runs]
    lines += ["", "Next"]
    if (directory / RESULTS_FILE).is_file():
        lines.append(f"  Results of all runs: {shown / RESULTS_FILE}")
    if runs:
        lines += ["  Describe a single run:", f"    {command_text('--info', str(shown / runs[0].name))}"]
    if (directory / STUDY_FILE).is_file():
        lines.append(f"  Resume the sweep: the same command with hydra.sweep.dir={shlex.quote(str(shown))}")
    lines += ["  Write its report:", f"    {command_text('--report', str(shown))}"]
    return [*lines, "  Show its statistics:", f"    tensorboard --logdir {shlex.quote(str(shown))}"]


# -- the files of a run ------------------------------------------------------------------------------------------------

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


@dataclass(frozen=True)
class CheckedFile:
    """A file, or a directory of files, with the result of its check.

    :param name: Relative to the directory of the run.
    :param size: In bytes.
    :param kind: Its content in a few words.
    :param problem: The damage; empty: none.
    :param state: The state of the training run, if the file holds it.
    """

    name: str
    size: int
    kind: str
    problem: str = ""
    state: Mapping[str, Any] | None = None

    def line(self) -> str:
        """Return the file as a line of a table."""
        size = f"{self.size} B"
        for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
            if self.size >= factor:
                size = f"{self.size / factor:.1f} {unit}"
                break
        return f"  {self.name:<40} {size:>9}  {self.kind}: {f'DAMAGED: {self.problem}' if self.problem else 'valid'}"


def checked_files(directory: Path) -> list[CheckedFile]:
    """Read and check the files in the directory of a run."""
    files = [_checked(path) for path in sorted(directory.iterdir()) if path.is_file() and not path.name.startswith(".")]
    folders = [_checked_folder(directory / name, kind) for name, kind in _DIRECTORIES.items()]
    leftovers = [
        CheckedFile(path.name, path.stat().st_size, "left by an interrupted write; it can be deleted")
        for path in sorted(directory.glob(f"{TEMPORARY_PREFIX}*"))
    ]
    return [*files, *(folder for folder in folders if folder is not None), *leftovers]


def _checked(path: Path) -> CheckedFile:
    size = path.stat().st_size
    for pattern, kind, read in _READERS:
        if path.match(pattern):
            try:
                content = read(path)
            except (MazeError, OSError, ValueError) as error:
                text = " ".join(str(error).split()).replace(f"`{path}`", "it").replace(str(path), "it")
                return CheckedFile(path.name, size, kind, text.partition(". ")[0].rstrip(".") or type(error).__name__)
            if read is not load_state:
                return CheckedFile(path.name, size, kind)
            if STATE_FORMAT in content:
                what = f"state of the training run after epoch {content.get('epoch', '?')}"
                return CheckedFile(path.name, size, what, "", content)
            return CheckedFile(path.name, size, f"weights{' of the best model' * (path.name == 'state_dict.pt')}")
    return CheckedFile(path.name, size, "other file (not checked)")


def _read_events(path: Path) -> None:
    content = read_event_file(path)
    if content.n_damaged:
        raise MazeError(
            f"{content.n_lost_bytes} bytes in {content.n_damaged} places cannot be read; {len(content.events)} records "
            "can."
        )


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _read_json(path: Path) -> Any:
    return json.loads(_read_text(path))


_READERS: tuple[tuple[str, str, Callable[[Path], Any]], ...] = (
    ("*.pt", "checkpoint", load_state),
    ("spaces_config.pkl", "action and observation spaces", SpacesConfig.load),
    ("statistics*.pkl", "statistics for observation normalization", load_statistics),
    ("events.out.tfevents.*", "TensorBoard statistics", _read_events),
    ("*.yaml", "settings", read_yaml),
    ("versions.json", "versions", _read_json),
    ("run.json", "progress of the training run", _read_json),
    ("progress.csv", "table of all statistics", _read_text),
    ("report.html", "HTML report", _read_text),
    (PROGRESS_OF_RLLIB, "progress of the training run", _read_json),
    ("command.txt", "command", _read_text),
)
"""Pattern, kind and reader of each file; a reader raises an error for a damaged one."""


def _checked_folder(directory: Path, kind: str) -> CheckedFile | None:
    if not directory.is_dir():
        return None
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    damaged = [path.name for path in paths[:_N_CHECKED_PER_DIRECTORY] if not _is_whole(path)]
    unchecked = f", the first {_N_CHECKED_PER_DIRECTORY} checked" if len(paths) > _N_CHECKED_PER_DIRECTORY else ""
    problem = f"{len(damaged)} of them, {', '.join(damaged[:3])}" if damaged else ""
    size = sum(path.stat().st_size for path in paths)
    return CheckedFile(f"{directory.name}/", size, f"{len(paths)} {kind}{unchecked}", problem)


def _is_whole(path: Path) -> bool:
    """Return whether a pickle or an archive is complete, without executing it. Other files pass unless empty."""
    try:
        content = path.read_bytes()
        if content.startswith(b"PK"):
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                return archive.testzip() is None
        if content.startswith(b"\x80"):
            for _ in pickletools.genops(content):
                pass
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, UnicodeDecodeError, IndexError):
        return False
    return bool(content)
