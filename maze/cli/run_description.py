"""`maze-run --info <run directory>`: what a run was, what is left of it, and how to go on."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from maze.cli.errors import UsageError
from maze.cli.run_commands import again_command, resume_command, rollout_command
from maze.cli.run_files import CheckedFile, checked_files
from maze.cli.run_info import (
    COMMAND_FILE,
    CONFIG_FILE,
    VERSIONS_FILE,
    installed_versions,
    shown_path,
    stored_arguments,
    text_of,
)
from maze.core.errors import CheckpointError
from maze.core.utils.stored_config import read_stored_config
from maze.core.utils.stored_run import chosen_options
from maze.train.utils.training_record import read_record

SWEEP_FILES = ("sweep.jsonl", "multirun.yaml")
HYDRA_CONFIG = Path(".hydra") / "config.yaml"
_RUN_FILES = (HYDRA_CONFIG.as_posix(), CONFIG_FILE, COMMAND_FILE)
_NEEDED_OF_TRAININGS = ("latest.pt", "state_dict.pt", "spaces_config.pkl")
_N_CANDIDATES = 5
_LABEL_WIDTH = 13


def print_run_info(argument: str) -> int:
    """Prints what is known about a run.

    :param argument: Its directory, as it was given.
    :return: Exit status: 1 if a file is damaged.
    """
    directory = find_run(Path(argument))
    if is_sweep(directory):
        print("\n".join(_describe_sweep(directory)))
        return 0
    files = checked_files(directory)
    print("\n".join(_describe_run(directory, files)))
    return int(any(file.problem for file in files))


def find_run(path: Path, flag: str = "--info") -> Path:
    """The directory of a run or a sweep; an error names others that were probably meant.

    :raises UsageError: There is no run; names what may have been meant.
    """
    if is_run(path) or is_sweep(path):
        return path
    if path.is_file() and is_run(path.parent):
        raise UsageError(f"{flag}: {path} is a file of a run. Name its directory: maze-run {flag} {path.parent}")
    kind = "a file" if path.is_file() else "not the directory of a run" if path.is_dir() else "no directory"
    candidates = _candidates(path)
    hint = f" Did you mean {' or '.join(map(str, candidates))}?" if candidates else ""
    raise UsageError(
        f"{flag}: {path} is {kind}. Expected a directory that maze-run has made "
        f"({', '.join(_RUN_FILES[:2])} and {COMMAND_FILE} are in it), for instance outputs/<name>/<time>.{hint}"
    )


def is_run(directory: Path) -> bool:
    """Whether a training, rollout or other job has run there."""
    return directory.is_dir() and any((directory / name).is_file() for name in _RUN_FILES)


def is_sweep(directory: Path) -> bool:
    """Whether the runs of a sweep are there."""
    return any((directory / name).is_file() for name in SWEEP_FILES) and not (directory / CONFIG_FILE).is_file()


def _candidates(path: Path) -> list[Path]:
    """Runs near a path that is none: below it, else similarly named ones beside it; the newest first."""
    path = path.absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.is_dir())
    runs = list(dict.fromkeys(_runs_below(existing))) if existing != Path(existing.anchor) else []
    runs.sort(key=lambda run: run.stat().st_mtime, reverse=True)
    if existing != path:
        names = {run.relative_to(existing).as_posix(): run for run in runs}
        close = get_close_matches(path.relative_to(existing).as_posix(), names, n=_N_CANDIDATES, cutoff=0.5)
        runs = [names[name] for name in close] or runs
    return [_shown(run) for run in runs[:_N_CANDIDATES]]


def _runs_below(directory: Path) -> Iterator[Path]:
    for depth in ("", "*/", "*/*/", "*/*/*/"):
        for name in (CONFIG_FILE, *SWEEP_FILES):
            for file in directory.glob(f"{depth}{name}"):
                if is_run(file.parent) or is_sweep(file.parent):
                    yield file.parent


# -- a run -------------------------------------------------------------------------------------------------------------


def _describe_run(directory: Path, files: Sequence[CheckedFile]) -> list[str]:
    cfg, problem = _stored_config(directory)
    choices = chosen_options(directory)  # where they are lost, the configuration itself says what was used
    is_training = cfg is not None and "algorithm" in cfg
    lines = [f"Run in {directory.absolute()}", ""]
    lines += _row("kind", _kind(cfg))
    lines += _row("command", text_of(directory / COMMAND_FILE))
    lines += _row("time", _times(directory))
    lines += [line for label, text in _versions(directory) for line in _row(label, text)]
    if problem:
        lines += _row("settings", problem)
    if cfg is not None:
        lines += [line for label, text in _components(cfg, choices) for line in _row(label, text)]
    state = next((file.content for file in files if file.content is not None), None)
    if cfg is not None and is_rllib(cfg):
        lines += [line for label, text in _rllib_progress(directory) for line in _row(label, text)]
    elif is_training and cfg is not None:
        lines += [line for label, text in _recorded(directory) for line in _row(label, text)]
        lines += [line for label, text in _progress(cfg, state) for line in _row(label, text)]
    lines += ["", "Files"]
    lines += [file.line() for file in files] or ["  (none)"]
    lines += ["", "Go on", *_ways_on(directory, cfg, choices, files)]
    return lines


def _row(label: str, text: str | None) -> list[str]:
    return [f"  {label:<{_LABEL_WIDTH}}{text}"] if text else []


def _stored_config(directory: Path) -> tuple[DictConfig | None, str | None]:
    """The configuration of the run, or what is wrong with it."""
    for name in (Path(CONFIG_FILE), HYDRA_CONFIG):  # the seeds that were drawn are only in the former
        path = directory / name
        if not path.is_file():
            continue
        try:
            return OmegaConf.create(read_stored_config(path).value()), None
        except CheckpointError as error:
            return None, str(error)
    return None, f"{HYDRA_CONFIG} is missing"


def _kind(cfg: DictConfig | None) -> str:
    if cfg is None:
        return "unknown"
    if is_rllib(cfg):
        return "training with RLlib"
    if "algorithm" in cfg:
        return "training"
    target = OmegaConf.select(cfg, "runner._target_") or "?"
    return f"rollout ({target})" if "policy" in cfg else f"{target}"


def is_rllib(cfg: DictConfig) -> bool:
    """Whether it is the configuration of a training with RLlib, which has checkpoints of Ray's instead of latest.pt."""
    return str(OmegaConf.select(cfg, "runner._target_") or "").startswith("maze.rllib.")


def _times(directory: Path) -> str | None:
    stamps = [path.stat().st_mtime for path in directory.iterdir() if path.is_file()]
    if not stamps:
        return None
    first, last = (datetime.fromtimestamp(stamp).strftime("%Y-%m-%d %H:%M:%S") for stamp in (min(stamps), max(stamps)))
    return f"first file {first}, last change {last}"


def _versions(directory: Path) -> list[tuple[str, str]]:
    try:
        stored = json.loads(text_of(directory / VERSIONS_FILE) or "{}")
        versions, git = dict(stored.get("versions") or {}), stored.get("git")
    except (ValueError, AttributeError, TypeError):
        return [("versions", f"{VERSIONS_FILE} is damaged")]
    now = installed_versions()
    shown = [
        f"{name} {version}" + (f" (now {now.get(name)})" if now.get(name) != version else "")
        for name, version in versions.items()
        if version and name != "platform"
    ]
    rows = [("versions", ", ".join(shown))] if shown else []
    if isinstance(git, Mapping):
        changed = ", with uncommitted changes" if git.get("dirty") else ""
        rows.append(("git", f"{str(git.get('commit'))[:12]} (branch {git.get('branch')}{changed})"))
    return rows


def _components(cfg: DictConfig, choices: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for group in ("env", "wrappers", "algorithm", "model", "critic", "policy", "runner"):
        choice = choices.get(group) or choices.get(f"rllib/{group}")
        if group not in cfg and not choice:
            continue
        if group == "critic" and OmegaConf.select(cfg, "model.critic") != OmegaConf.select(cfg, "critic"):
            continue  # the model brings one of its own
        section = OmegaConf.select(cfg, group)
        details = []
        if isinstance(section, DictConfig):
            if group == "wrappers":
                details = [str(name).rpartition(".")[2] for name in section]
            elif section.get("_target_") and not (group == "algorithm" and choice):
                details = [str(section._target_)]
        if group == "env" and isinstance(section, DictConfig):
            details += [f"{key!s}={section[key]}" for key in section if key != "_target_" and _is_scalar(section, key)]
        if choice or details:
            yield group, f"{choice or '(own)'}{': ' if details else ''}{', '.join(details)}"
    seeding = OmegaConf.select(cfg, "seeding")
    if isinstance(seeding, DictConfig):
        yield "seeds", f"environment {seeding.get('env_base_seed')}, agent {seeding.get('agent_base_seed')}"


def _is_scalar(section: DictConfig, key: Any) -> bool:
    return not OmegaConf.is_missing(section, key) and not OmegaConf.is_config(section._get_node(key))


def _recorded(directory: Path) -> Iterator[tuple[str, str]]:
    record = read_record(directory)
    if record is not None:
        steps = record.get("n_env_steps")
        yield "state", f"{record.get('state')}{f', {steps:,} environment steps' if isinstance(steps, int) else ''}"


def _progress(cfg: DictConfig, state: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if state is None:
        yield "progress", "unknown: there is no readable latest.pt; it is written when the first epoch ends"
        return
    total = OmegaConf.select(cfg, "algorithm.n_epochs")
    of_total = f" of {total}" if total else ""
    ending = "the training came to its end" if state.get("is_finished") else "stopped before its end"
    yield "progress", f"{state.get('epoch', '?')}{of_total} epochs done, {ending}"
    selection = state.get("model_selection")
    if isinstance(selection, Mapping) and selection.get("n_updates"):
        violation = float(selection.get("best_violation") or 0.0)
        broken = f", constraints broken by {violation:.5g}" if violation else ""
        age = selection.get("last_improvement")
        best = float(selection["best_reward"]) * (1 if selection.get("maximize", True) else -1)
        yield "best score", f"{best:.5g}{broken} ({age} evaluations before the last one)"


def _rllib_progress(directory: Path) -> Iterator[tuple[str, str]]:
    from maze.rllib.statistics import read_progress

    progress = read_progress(directory)
    if progress is None:
        yield "progress", "unknown: there is no rllib_progress.json; it is written with the first checkpoint of Ray's"
        return
    ending = "the training came to its end" if progress.get("is_finished") else "stopped before its end"
    yield "progress", f"{progress.get('iteration', '?')} iterations done, {ending}"
    if progress.get("best_score") is not None:
        yield "best score", f"{float(progress['best_score']):.5g}"


def _ways_on(
    directory: Path, cfg: DictConfig | None, choices: Mapping[str, Any], files: Sequence[CheckedFile]
) -> list[str]:
    if cfg is None:
        return ["  Without its configuration neither command can be given."]
    usable = {file.name for file in files if not file.problem}
    state = next((file.content for file in files if file.content is not None), {})
    n_finished = int(state.get("epoch", 0)) if state.get("is_finished") else None
    arguments = stored_arguments(directory)
    shown = _shown(directory)
    lines = []
    if "algorithm" in cfg:
        needed = ("state_dict.pt", "spaces_config.pkl") if is_rllib(cfg) else _NEEDED_OF_TRAININGS
        if "latest.pt" in usable:
            title = "Train on, for as many epochs again" if n_finished else "Resume the training"
            lines += [f"  {title}:", f"    {resume_command(arguments, cfg, shown, n_finished)}"]
        if {"state_dict.pt", "spaces_config.pkl"} <= usable:
            command, note = rollout_command(arguments, cfg, choices, shown)
            lines += ["  Roll the best policy out:", f"    {command}", *([f"    ({note})"] if note else [])]
        missing = [name for name in needed if name not in usable]
        if missing:
            lines.append(f"  Missing or damaged, and needed for that: {', '.join(missing)}.")
            others = sorted(name for name in usable if name.endswith(".pt") and name not in missing)
            lines += [f"  Readable checkpoints: {', '.join(others)}."] if others else []
    else:
        lines += ["  Run it again:", f"    {again_command(arguments)}"]
    if "progress.csv" in usable:
        lines += ["  Make its report:", f"    maze-run --report {shlex.quote(str(shown))}"]
    if any(file.name.startswith("events.out.tfevents") for file in files):
        lines += ["  Look at its statistics:", f"    tensorboard --logdir {shlex.quote(str(shown))}"]
    return lines


def _shown(path: Path) -> Path:
    """Relative to the current directory where it lies below."""
    return shown_path(path, Path.cwd())


# -- a sweep -----------------------------------------------------------------------------------------------------------


def _describe_sweep(directory: Path) -> list[str]:
    runs = sorted((run.parent for run in directory.glob(f"*/{CONFIG_FILE}")), key=lambda run: (len(run.name), run.name))
    lines = [f"Sweep in {directory.absolute()}", "", *_row("runs", str(len(runs)))]
    for run in runs:
        overrides = text_of(run / HYDRA_CONFIG.parent / "overrides.yaml")
        shown = " ".join(line.removeprefix("- ") for line in overrides.splitlines())
        lines += _row(run.name, shown if shown != "[]" else "(no overrides)")
    lines += ["", "Go on"]
    for name, what in (("results.csv", "Results of all runs"), ("jobs.csv", "What became of the jobs")):
        if (directory / name).is_file():
            lines.append(f"  {what}: {_shown(directory / name)}")
    if runs:
        lines += ["  A single run:", f"    maze-run --info {shlex.quote(str(_shown(runs[0])))}"]
    if (directory / "sweep.jsonl").is_file():
        lines.append(f"  Run what is left: the same command with hydra.sweep.dir={shlex.quote(str(_shown(directory)))}")
    lines.append(f"  Make the report:\n    maze-run --report {shlex.quote(str(_shown(directory)))}")
    lines.append(f"  Look at the statistics:\n    tensorboard --logdir {shlex.quote(str(_shown(directory)))}")
    return lines
