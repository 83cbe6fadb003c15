"""What the files of a run's directory tell about it, for its report."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maze.cli.hydra_setup import value_text
from maze.cli.run_commands import again_command, resume_command
from maze.cli.run_info import (
    COMMAND_FILE,
    CONFIG_FILE,
    VERSIONS_FILE,
    shown_path,
    stored_arguments,
    text_of,
)
from maze.cli.run_list import algorithm_name, environment_name
from maze.core.errors import MazeError
from maze.core.utils.stored_run import chosen_options, read_plain_yaml

if TYPE_CHECKING:
    from maze.report.progress import Progress
    from maze.report.report_writer import ReportWriter
    from maze.report.run_page import RunFacts

_BY_NAME = ("gym_env", "atari", "pettingzoo")
_GROUPS = ("env", "wrappers", "model", "critic", "algorithm", "rllib/algorithm", "runner", "rllib/runner", "experiment")
_SHOWN_VERSIONS = ("maze-rl", "python", "torch", "numpy", "gymnasium")


def report_writer(directory: Path, project: Path) -> ReportWriter:
    """Keeps the report of a run that begins.

    :param directory: Of the run, with its configuration and command in it.
    :param project: Where the command was started; commands that go on with the run are meant to be given there.
    """
    from maze.report.report_writer import ReportWriter

    return ReportWriter(directory, facts_of(directory, project), _resumed(directory))


def _resumed(directory: Path) -> Progress | None:
    """The statistics of the run that this one goes on with, if it does."""
    from maze.report.progress import read_progress

    cfg = read_plain_yaml(directory / CONFIG_FILE)
    if not cfg.get("resume") or not cfg.get("input_dir"):
        return None
    try:
        return read_progress(Path(str(cfg["input_dir"])))
    except MazeError:
        return None


def facts_of(directory: Path, project: Path) -> RunFacts:
    """What is known about a run besides its statistics; what cannot be read is left out.

    :param directory: Of the run.
    :param project: Directory that commands are meant to be given in.
    """
    from maze.report.run_page import RunFacts

    directory = directory.absolute()
    cfg = read_plain_yaml(directory / CONFIG_FILE)
    return RunFacts(
        name="/".join(directory.parts[-2:]),
        title=title_of(directory, cfg),
        started=_started(directory),
        facts=list(_facts(directory, cfg)),
        settings=list(_overrides(directory)),
        config=text_of(directory / CONFIG_FILE),
        commands=list(_commands(stored_arguments(directory), cfg, shown_path(directory, project))),
    )


def title_of(directory: Path, cfg: Mapping[str, Any]) -> str:
    """Environment and algorithm of a run in a few words."""
    option = chosen_options(directory).get("env")
    # An environment that an option describes is called what the option is called, unless it describes all of a package.
    names = [str(option) if option and option not in _BY_NAME else environment_name(cfg.get("env"))]
    names += [algorithm_name(cfg["algorithm"], directory)] if "algorithm" in cfg else []
    return ", ".join(name for name in names if name and name != "None") or directory.name


def _facts(directory: Path, cfg: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    choices = chosen_options(directory)
    for group in _GROUPS:
        if choices.get(group):
            yield group, str(choices[group])
    seeding = cfg.get("seeding")
    if isinstance(seeding, Mapping):
        yield "seeds", f"environment {seeding.get('env_base_seed')}, agent {seeding.get('agent_base_seed')}"
    if cfg.get("input_dir"):
        yield "began with", str(cfg["input_dir"])
    try:
        stored = json.loads(text_of(directory / VERSIONS_FILE))
        versions, git = stored.get("versions") or {}, stored.get("git") or {}
        shown = [f"{name} {versions[name]}" for name in _SHOWN_VERSIONS if versions.get(name)]
        if shown:
            yield "versions", ", ".join(shown)
        if git.get("commit"):
            yield "git", f"{str(git['commit'])[:12]}{' with uncommitted changes' if git.get('dirty') else ''}"
    except (ValueError, AttributeError, TypeError):
        return


def _commands(arguments: Sequence[str], cfg: Mapping[str, Any], shown: Path) -> Iterator[tuple[str, str]]:
    if arguments:
        yield "Run it again", again_command(arguments)
        yield "Go on where it stopped", resume_command(arguments, cfg, shown)
    yield "Watch its best policy", shlex.join(["maze-run", "--play", str(shown)])
    inspected = f"policies=[{value_text(shown)}]"
    yield "Look at its decisions, step by step", shlex.join(["maze-run", "-cn", "conf_inspect", inspected])
    compared = f"policies=[random,{value_text(shown)}]"
    yield "Compare it with others in the same episodes", shlex.join(["maze-run", "-cn", "conf_compare", compared])
    yield "Everything about its files", shlex.join(["maze-run", "--info", str(shown)])


def _overrides(directory: Path) -> Iterator[tuple[str, str, str | None]]:
    """What the command has set."""
    import yaml

    try:
        overrides = yaml.safe_load(text_of(directory / ".hydra" / "overrides.yaml"))
    except yaml.YAMLError:
        return
    for override in overrides if isinstance(overrides, list) else ():
        key, _, value = str(override).partition("=")
        yield key, value, None


def _started(directory: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp((directory / COMMAND_FILE).stat().st_mtime)
    except OSError:
        return None
