"""Files that describe a run (command, configuration, versions), and summaries made from them.

Summaries are the list of runs (`--runs`), the facts for reports, and the first and last console lines of a run.
"""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from maze.cli.hydra_setup import SHIPPED_ALGORITHMS, UsageError, as_written
from maze.cli.run_directory import environment_option
from maze.console.runs import duration_text
from maze.core.errors import MazeError
from maze.core.log_stats.stats_format import significant
from maze.core.utils.config_utils import config_to_yaml, gym_env_defaults, value_text
from maze.core.utils.files import aligned, read_json_object, write_whole
from maze.core.utils.stored_config import (
    SPACES_FILE,
    STORED_CONFIG,
    chosen_options,
    own_packages,
    read_plain_yaml,
    remembered,
)
from maze.report.progress import Progress, read_progress
from maze.report.run_page import ReportWriter, RunFacts
from maze.train.utils.run_process import ENDED, read_record
from maze.utils.process import version_of

# Options that configure all environments of a package.
_BY_NAME = ("gym_env", "atari", "pettingzoo")
_GROUPS = ("env", "wrappers", "model", "critic", "algorithm", "rllib/algorithm", "runner", "rllib/runner", "experiment")
_SHOWN_VERSIONS = ("maze-rl", "python", "torch", "numpy", "gymnasium")
PACKAGES = ("maze-rl", "torch", "numpy", "gymnasium", "hydra-core", "omegaconf", "pandas", "tensorboard", "ray")

CONFIG_FILE = "hydra_config.yaml"
COMMAND_FILE = "command.txt"
TRUST = "--trust"
FROM_PYTHON = "  # and, from Python, "
"""Begins the remark about parts of a run that are no text."""
VERSIONS_FILE = "versions.json"
_RUN_FILES = (STORED_CONFIG.as_posix(), CONFIG_FILE, COMMAND_FILE)


# -- files of a run ----------------------------------------------------------------------------------------------------


def command_text(*arguments: str) -> str:
    """Return a command as text for a shell."""
    return shlex.join(["maze-run", *as_written(arguments)])


def git_state(directory: Path) -> dict[str, Any] | None:
    """Return commit, branch and whether files differ from the commit; None outside a repository or without git."""
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        result = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = result.stdout.splitlines()
    facts = dict(line.split()[1:3] for line in lines if line.startswith("#"))
    is_dirty = any(not line.startswith("#") for line in lines)
    return {"commit": facts.get("branch.oid"), "branch": facts.get("branch.head"), "dirty": is_dirty}


def installed_versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that influence results; None: not installed."""
    own = {"python": platform.python_version(), "platform": platform.platform()}
    return {**own, **{package: version_of(package) for package in PACKAGES}}


def write_run_info(directory: Path, cfg: DictConfig, project: Path, arguments: Sequence[str] | None = None) -> None:
    """Write configuration, command and versions into a run directory.

    Policy and environment are built again from the configuration in the place of Hydra's file, which lacks what was
    completed after the composition.

    :param project: Working directory of the command; its git state is recorded.
    :param arguments: Arguments of the command; those of this process by default.
    """
    command = command_text(*(sys.argv[1:] if arguments is None else arguments))
    versions = {"versions": installed_versions(), "git": git_state(project)}
    for name, text in (
        (CONFIG_FILE, config_to_yaml(cfg, sort_keys=True)),
        (STORED_CONFIG, config_to_yaml(cfg)),
        (COMMAND_FILE, command + "\n"),
        (VERSIONS_FILE, json.dumps(versions, indent=2) + "\n"),
    ):
        write_whole(directory / name, text)
    overrides = directory / STORED_CONFIG.with_name("overrides.yaml")
    if overrides.is_file() and "$" in (text := overrides.read_text(encoding="utf-8")):
        write_whole(overrides, OmegaConf.to_yaml(as_written(yaml.safe_load(text))))


def text_of(path: Path) -> str:
    """Return the stripped content of a text file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def stored_arguments(directory: Path) -> list[str]:
    """Return the arguments of a run's command; empty if they cannot be read, or if they are not all of the run."""
    text = text_of(directory / COMMAND_FILE)
    try:
        return [] if FROM_PYTHON in text else shlex.split(text)[1:]
    except ValueError:
        return []


def shown_path(path: Path, project: Path) -> Path:
    """Return a path relative to the working directory of the command, if it lies below it."""
    path = path.absolute()
    return path.relative_to(project) if path.is_relative_to(project) else path


# -- finding a run -----------------------------------------------------------------------------------------------------


def named_directory(flag: str, arguments: Sequence[str], default: str) -> Path:
    """Return the directory that a command names, or the default."""
    if len(arguments) > 1:
        raise UsageError(f"{flag}: expected one directory, found {len(arguments)}: {', '.join(arguments)}.")
    return Path(*arguments or [default])


def find_run(path: Path, flag: str = "--info") -> Path:
    """Return the directory of a run.

    :raises UsageError: It is not a directory of a run.
    """
    if is_run(path):
        return path
    raise UsageError(
        f"{flag}: {path} is not the directory of a run. Expected a directory written by maze-run, with "
        f"{', '.join(_RUN_FILES)}, such as outputs/<name>/<time>; maze-run --runs lists them."
    )


def is_run(directory: Path) -> bool:
    """Return whether it is the directory of a training run, a rollout or another job."""
    return directory.is_dir() and any((directory / name).is_file() for name in _RUN_FILES)


# -- names and progress ------------------------------------------------------------------------------------------------


def environment_name(env: Any) -> str:
    """Return the name of the environment that the section `env` of a configuration describes."""
    section = env if isinstance(env, Mapping) else {}
    name, target, defaults = section.get("name"), section.get("_target_", env), gym_env_defaults()
    # Where only `env._target_` was changed, the section still has the default environment's name.
    is_left_over = target != defaults["_target_"] and name == defaults["name"]
    return name if isinstance(name, str) and not is_left_over else str(target).rpartition(".")[2]


def algorithm_name(algorithm: Any, run: Path) -> str:
    """Return the name of the algorithm that the section `algorithm` of a run's configuration describes.

    :param algorithm: The section.
    :param run: Directory of the run.
    """
    target = algorithm.get("_target_") if isinstance(algorithm, Mapping) else None
    shipped = next((option for option, path in SHIPPED_ALGORITHMS.items() if path == target), None)
    choices = chosen_options(run)
    return str(shipped or choices.get("algorithm") or choices.get("rllib/algorithm") or target or "?")


def stored_overrides(directory: Path) -> list[str]:
    """Return the overrides of a run's command."""
    try:
        overrides = yaml.safe_load(text_of(directory / STORED_CONFIG.parent / "overrides.yaml"))
    except yaml.YAMLError:
        return []
    return [str(override) for override in overrides] if isinstance(overrides, list) else []


# -- commands for a run ------------------------------------------------------------------------------------------------


def trust_arguments(packages: Iterable[str], project: Path) -> list[str]:
    """Return the arguments by which a command may import the user's packages that stored runs name.

    :param packages: The packages; none: there are no arguments.
    :param project: Working directory of the command, for which packages may be remembered as trusted.
    """
    names = ",".join(sorted(set(packages) - set(remembered(project))))
    return [TRUST, names] if names else []


def run_commands(directory: Path, project: Path, usable: Container[str] | None = None) -> dict[str, str]:
    """Return the commands that use a run, by their purposes.

    :param directory: Its directory.
    :param project: Working directory of the commands.
    :param usable: Names of its undamaged files; `None`: this process wrote them, so that the commands trust the user's
        packages that its configuration names.
    """

    def has(*names: str) -> bool:
        return all((directory / name).exists() if usable is None else name in usable for name in names)

    cfg, arguments = read_plain_yaml(directory / CONFIG_FILE), stored_arguments(directory)
    shown = shown_path(directory, project)
    run, commands = value_text(shown), dict[str, str]()
    trusted = trust_arguments(own_packages(cfg), project) if usable is None else []
    if has("state_dict.pt", SPACES_FILE) and "algorithm" in cfg:
        commands = {
            "Show an episode of its best policy": command_text("--play", str(shown), *trusted),
            "Inspect its decisions step by step": command_text("-cn", "conf_inspect", f"policies=[{run}]", *trusted),
            "Compare it with a random policy": command_text(
                *("-cn", "conf_compare", f"policies=[random,{run}]"), *trusted
            ),
            "Describe and check its files": command_text("--info", str(shown)),
        }
    if arguments and has("latest.pt"):
        record = read_record(directory) or {}
        n_epochs = record.get("epoch") if record.get("state") == ENDED else None
        purpose = "Resume it for as many epochs again" if n_epochs else "Resume it"
        commands[purpose] = _resume_command(arguments, cfg, shown, n_epochs)
    return commands


def _resume_command(arguments: Sequence[str], cfg: Mapping[str, Any], directory: Path, n_epochs: int | None) -> str:
    """Return the command that resumes a training run.

    :param n_epochs: Epochs of a run that has ended: the command trains for as many again.
    """
    dropped = ["hydra.run.dir=", "input_dir=", "resume=", "+resume=", "seeding."]
    added = [f"input_dir={value_text(directory)}", "resume=true" if "resume" in cfg else "+resume=true"]
    if n_epochs:
        dropped.append("algorithm.n_epochs=")
        added.append(f"algorithm.n_epochs={2 * n_epochs}")
    return command_text(*(each for each in arguments if not each.startswith(tuple(dropped))), *added)


# -- first and last lines of a run -------------------------------------------------------------------------------------


def beginning(directory: Path, project: Path) -> str:
    """Return the line that names the directory of a run.

    :param directory: Its directory.
    :param project: Working directory of the command.
    """
    return f"-> writing into {shown_path(directory, project)}"


def ending(directory: Path, project: Path, seconds: float, commands: Mapping[str, str] | None = None) -> str:
    """Return the result of a run, the location of its files, and commands that use it.

    :param directory: Its directory.
    :param project: Working directory of the command.
    :param seconds: Duration of the run.
    :param commands: Commands by their purposes; `None`: those that use a training run.
    """
    lines = [f"Results are in {shown_path(directory, project)}."]
    if (record := read_record(directory)) is not None:
        verb = "Trained" if record.get("state") == ENDED else "Interrupted after"
        lines.insert(0, f"{verb} {_done(record)} in {duration_text(seconds)}{_best(record)}.")
    if commands is None:
        commands = run_commands(directory, project) if (directory / "state_dict.pt").is_file() else {}
    if commands:
        lines += ["Next:", *(line for what, command in commands.items() for line in (f"  # {what}", f"  {command}"))]
    return "\n".join(lines)


def progress_of(directory: Path) -> str:
    """Return state, progress and best score of a training run; empty: it has not trained so far."""
    record = read_record(directory)
    return "" if record is None else f"{record.get('state')}, {_done(record)}{_best(record)}"


def _done(record: Mapping[str, Any]) -> str:
    unit = "iteration" if "iteration" in record else "epoch"  # RLlib counts iterations
    number, n_steps = record.get(unit), record.get("n_env_steps")
    steps = f", {n_steps:,} environment steps" if isinstance(n_steps, int) and n_steps else ""
    return f"{number} {unit}{'' if number == 1 else 's'}{steps}"


def _best(record: Mapping[str, Any]) -> str:
    score, violation = record.get("best_score"), record.get("violation")
    if not isinstance(score, float | int):
        return ""
    return f"; best score {significant(score)}{f' (constraints are violated by {violation:.5g})' if violation else ''}"


# -- the report --------------------------------------------------------------------------------------------------------


def report_writer(directory: Path, project: Path) -> ReportWriter:
    """Return the writer of a run's report.

    :param directory: Directory of the run, with its configuration and command.
    :param project: Working directory of the command; the commands in the report refer to it.
    """
    return ReportWriter(directory, facts_of(directory, project), _resumed(directory))


def _resumed(directory: Path) -> Progress | None:
    """Return the statistics of the run that this one resumes, if any."""
    cfg = read_plain_yaml(directory / CONFIG_FILE)
    if not cfg.get("resume") or not cfg.get("input_dir"):
        return None
    try:
        return read_progress(Path(str(cfg["input_dir"])))
    except MazeError:
        return None


def facts_of(directory: Path, project: Path) -> RunFacts:
    """Return the facts about a run besides its statistics; unreadable parts are left out.

    :param directory: Directory of the run.
    :param project: Working directory of the commands.
    """
    directory = directory.absolute()
    cfg = read_plain_yaml(directory / CONFIG_FILE)
    command = directory / COMMAND_FILE
    option = chosen_options(directory).get("env")
    title = [str(option) if option and option not in _BY_NAME else environment_name(cfg.get("env"))]
    title += [algorithm_name(cfg["algorithm"], directory)] if "algorithm" in cfg else []
    return RunFacts(
        name="/".join(directory.parts[-2:]),
        title=", ".join(name for name in title if name and name != "None") or directory.name,
        started=datetime.fromtimestamp(command.stat().st_mtime) if command.is_file() else None,
        facts=list(_facts(directory, cfg)),
        settings=[(key, value) for key, _, value in (t.partition("=") for t in stored_overrides(directory))],
        config=text_of(directory / CONFIG_FILE),
        commands=list(run_commands(directory, project).items()),
    )


def _facts(directory: Path, cfg: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    choices = chosen_options(directory)
    choices["env"] = environment_option(choices.get("env"), cfg.get("env"))
    yield from ((group, str(choices[group])) for group in _GROUPS if choices.get(group))
    stored = read_json_object(directory / VERSIONS_FILE)
    versions, git, seeding = (
        each if isinstance(each, dict) else {}
        for each in (stored.get("versions"), stored.get("git"), cfg.get("seeding"))
    )
    changed = " with uncommitted changes" if git.get("dirty") else ""
    rows = {
        "seeds": ", ".join(f"{name} {seeding.get(f'{name}_base_seed')}" for name in ("env", "agent") if seeding),
        "input_dir": str(cfg.get("input_dir") or ""),
        "versions": ", ".join(f"{name} {versions[name]}" for name in _SHOWN_VERSIONS if versions.get(name)),
        "git": f"{str(git['commit'])[:12]} (branch {git.get('branch')}){changed}" if git.get("commit") else "",
    }
    yield from ((label, text) for label, text in rows.items() if text)


# -- the list of runs --------------------------------------------------------------------------------------------------


def print_runs(arguments: Sequence[str]) -> int:
    """Print a table of the training runs below a directory, the newest last, without reading checkpoints.

    :param arguments: The directory; none: `outputs`.
    :return: Exit status.
    :raises UsageError: It is not a directory.
    """
    directory = named_directory("--runs", arguments, "outputs")
    if not directory.is_dir():
        raise UsageError(f"--runs: {directory} is not a directory. Expected a directory of runs, such as outputs.")
    files = (file for depth in ("", "*/", "*/*/", "*/*/*/") for file in directory.glob(f"{depth}{CONFIG_FILE}"))
    found = [(file.parent, read_plain_yaml(file)) for file in files]
    found.sort(key=lambda entry: (entry[0] / CONFIG_FILE).stat().st_mtime)
    runs = [_listed(run, cfg) for run, cfg in found if "algorithm" in cfg]
    header = ("run", "environment", "algorithm", "steps", "best score", "state", "date")
    print("\n".join(aligned([header, *runs])) if runs else f"No training runs in {directory.absolute()}.")
    return 0


def _listed(run: Path, cfg: Mapping[str, Any]) -> tuple[str, ...]:
    record = read_record(run) or {"state": "not started"}
    steps, score = record.get("n_env_steps"), record.get("best_score")
    broken = f" (broken by {record['violation']:.3g})" if record.get("violation") else ""
    return (
        str(run),
        environment_name(cfg.get("env")),
        algorithm_name(cfg["algorithm"], run),
        f"{steps:,}" if isinstance(steps, int) and steps else "-",
        f"{score:.5g}{broken}" if isinstance(score, int | float) else "-",
        str(record.get("state")),
        datetime.fromtimestamp((run / CONFIG_FILE).stat().st_mtime).strftime("%Y-%m-%d %H:%M"),
    )
