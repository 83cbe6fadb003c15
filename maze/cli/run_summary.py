"""What is known of a run: listed (`--runs`), described (`--info`), reported, and announced at its beginning and end."""

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
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from omegaconf import DictConfig, OmegaConf

from maze.cli.errors import UsageError
from maze.cli.hydra_setup import value_text
from maze.cli.run_directory import environment_option
from maze.cli.run_info import (
    COMMAND_FILE,
    CONFIG_FILE,
    HYDRA_CONFIG,
    VERSIONS_FILE,
    find_run,
    installed_versions,
    is_sweep,
    runs_below,
    shown_path,
    stored_arguments,
    text_of,
)
from maze.cli.sweeps.results import STUDY_FILE
from maze.core.errors import CheckpointError, MazeError
from maze.core.log_stats.stats_format import significant
from maze.core.utils.config_utils import gym_env_defaults
from maze.core.utils.files import TEMPORARY_PREFIX, read_json_object
from maze.core.utils.stored_config import read_stored_config, read_yaml
from maze.core.utils.stored_run import chosen_options, read_plain_yaml
from maze.train.utils.training_record import ENDED, INTERRUPTED, read_record

if TYPE_CHECKING:
    from maze.report.progress import Progress
    from maze.report.report_writer import ReportWriter
    from maze.report.run_page import RunFacts

_BY_NAME = ("gym_env", "atari", "pettingzoo")
"""Options that describe all environments of a package."""
_GROUPS = ("env", "wrappers", "model", "critic", "algorithm", "rllib/algorithm", "runner", "rllib/runner", "experiment")
_SHOWN_VERSIONS = ("maze-rl", "python", "torch", "numpy", "gymnasium")
_CLASS_SUFFIX = "AlgorithmConfig"
_PROGRESS_OF_RLLIB = "rllib_progress.json"
_RESULTS = {
    "report.html": "for a browser",
    "state_dict.pt": "the best model",
    "latest.pt": "the latest state",
    "progress.csv": "every statistic",
    "maze_cli.log": "the same as a log",
    "trajectory_data": "trajectories",
    "trajectory_parquet": "episodes as tables",
    "event_logs": "tables of events",
    "episode_pages": "pages of episodes",
    "action_records": "actions",
    "comparison.csv": "the comparison",
    "gate.md": "the verdict",
}
"""Files that the last lines of a run name."""


# -- names and progress ------------------------------------------------------------------------------------------------


def environment_name(env: Any) -> str:
    """Return the name of the environment that a section of a configuration describes."""
    from maze.core.utils.config_utils import gym_env_defaults

    section = env if isinstance(env, Mapping) else {}
    name, target, defaults = section.get("name"), section.get("_target_", env), gym_env_defaults()
    # Where only `env._target_` was changed, the default environment's name is still there.
    is_left_over = target != defaults["_target_"] and name == defaults["name"]
    return name if isinstance(name, str) and not is_left_over else str(target).rpartition(".")[2]


def algorithm_name(algorithm: Any, run: Path) -> str:
    """Return the name of the algorithm that a section of a run's configuration describes.

    :param algorithm: The section.
    :param run: Directory of the run.
    """
    target = algorithm.get("_target_") if isinstance(algorithm, Mapping) else None
    name = str(target).rpartition(".")[2]
    if target and name.endswith(_CLASS_SUFFIX):
        return name.removesuffix(_CLASS_SUFFIX).lower()
    choices = chosen_options(run)
    return str(choices.get("algorithm") or choices.get("rllib/algorithm") or target or "?")


def title_of(directory: Path, cfg: Mapping[str, Any]) -> str:
    """Return environment and algorithm of a run in a few words."""
    option = chosen_options(directory).get("env")
    names = [str(option) if option and option not in _BY_NAME else environment_name(cfg.get("env"))]
    names += [algorithm_name(cfg["algorithm"], directory)] if "algorithm" in cfg else []
    return ", ".join(name for name in names if name and name != "None") or directory.name


def record_of(run: Path) -> Mapping[str, Any] | None:
    """Return what a training has recorded of its state, with Maze or RLlib; `None`: nothing yet."""
    record = read_record(run)
    if record is None and (progress := read_json_object(run / _PROGRESS_OF_RLLIB)):
        state = ENDED if progress.get("is_finished") else INTERRUPTED
        return {"state": state, "epoch": progress.get("iteration"), "best_score": progress.get("best_score")}
    return record


def _versions(directory: Path) -> tuple[Mapping[str, Any], str] | None:
    """The versions that a run used, and its commit in words; `None`: the file is damaged."""
    try:
        stored = json.loads(text_of(directory / VERSIONS_FILE) or "{}")
        git = stored.get("git") or {}
        changed = " with uncommitted changes" if git.get("dirty") else ""
        commit = f"{str(git['commit'])[:12]} (branch {git.get('branch')}){changed}" if git.get("commit") else ""
        return dict(stored.get("versions") or {}), commit
    except (ValueError, AttributeError, TypeError):
        return None


def _seeds(cfg: Mapping[str, Any]) -> str:
    seeding = cfg.get("seeding")
    if not isinstance(seeding, Mapping):
        return ""
    return f"environment {seeding.get('env_base_seed')}, agent {seeding.get('agent_base_seed')}"


# -- commands that continue from a run ---------------------------------------------------------------------------------


def again_command(arguments: Sequence[str]) -> str:
    """Return the command that does the same in another directory.

    :param arguments: Arguments of the command that wrote into this one.
    """
    return shlex.join(["maze-run", *(each for each in arguments if not each.startswith("hydra.run.dir="))])


def resume_command(
    arguments: Sequence[str], cfg: Mapping[str, Any], directory: Path, n_finished_epochs: int | None = None
) -> str:
    """Return the command that resumes a training.

    :param arguments: Arguments of the command that started it.
    :param cfg: Its configuration.
    :param directory: Its directory.
    :param n_finished_epochs: Epochs of a training that has ended: it is trained for as many again.
    """
    dropped = ["hydra.run.dir=", "input_dir=", "resume=", "+resume=", "seeding."]
    added = [f"input_dir={directory}", "resume=true" if "resume" in cfg else "+resume=true"]
    if n_finished_epochs:
        dropped.append("algorithm.n_epochs=")
        added.append(f"algorithm.n_epochs={2 * n_finished_epochs}")
    kept = [argument for argument in arguments if not argument.startswith(tuple(dropped))]
    return shlex.join(["maze-run", *kept, *added])


def _rollout_command(arguments: Sequence[str], directory: Path) -> str:
    """The command that rolls the best policy out, in the environment and the wrappers of its training.

    These are taken over from the directory; what the command has named itself is named again, which makes code of the
    user's own known. With an experiment or another root configuration, it is only a part of what was used.
    """
    flags: list[str] = []
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if flag.partition("=")[0] in ("-cd", "--config-dir"):
            flags += [flag] if "=" in flag else [flag, value]
    is_all = "conf_train" in arguments and not any("experiment=" in argument for argument in arguments)
    sections = ("trusted_packages=", *(("env=", "env.", "wrappers") if is_all else ()))
    named = [argument for argument in arguments if argument.lstrip("+~").startswith(sections)]
    return shlex.join(["maze-run", *flags, *named, "policy=torch_policy", f"input_dir={directory}"])


def _command(*arguments: str) -> str:
    return shlex.join(["maze-run", *arguments])


def _compare_command(shown: Path) -> str:
    return _command("-cn", "conf_compare", f"policies=[random,{value_text(shown)}]")


# -- what a run prints when it begins and ends -------------------------------------------------------------------------


def beginning(directory: Path, project: Path) -> str:
    """Return the line that names the directory of a run.

    :param directory: Its directory.
    :param project: Directory that the command was given in.
    """
    return f"-> writing into {shown_path(directory, project)}"


def ending(directory: Path, project: Path, seconds: float, commands: Sequence[tuple[str, str]] | None = None) -> str:
    """Return what a run has reached, where its files are, and how to continue.

    :param directory: Its directory.
    :param project: Directory that the command was given in.
    :param seconds: How long it took.
    :param commands: Commands and their purposes; `None`: those that follow a training.
    """
    shown = shown_path(directory, project)
    present = [f"{name} ({what})" for name, what in _RESULTS.items() if (directory / name).exists()]
    lines = [*_reached(directory, seconds), f"Everything is in {shown}{':' if present else '.'}"]
    lines += [f"  {', '.join(present)}"] if present else []
    if commands is None:
        commands = list(_next_commands(directory, shown)) if (directory / "state_dict.pt").is_file() else []
    if commands:
        lines += ["Next:", *(line for command, what in commands for line in (f"  # {what}", f"  {command}"))]
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{significant(seconds, 3 if seconds < 10 else 2)} s"


def _reached(directory: Path, seconds: float) -> Iterator[str]:
    record = record_of(directory)
    if record is None:
        return
    unit = "iteration" if read_record(directory) is None else "epoch"
    verb = "Trained" if record.get("state") == ENDED else "Interrupted after"
    epoch, n_steps, score = record.get("epoch"), record.get("n_env_steps"), record.get("best_score")
    steps = f", {n_steps:,} environment steps" if isinstance(n_steps, int) and n_steps else ""
    best = f"; best score {significant(score)}" if isinstance(score, float | int) else ""
    if best and record.get("violation"):
        best += f" (constraints are broken by {record['violation']:.5g})"
    yield f"{verb} {epoch} {unit}{'' if epoch == 1 else 's'}{steps} in {_duration(seconds)}{best}."


def _next_commands(directory: Path, shown: Path) -> Iterator[tuple[str, str]]:
    yield _command("--play", str(shown)), "watch its best policy"
    yield _compare_command(shown), "compare it with random decisions"
    record, arguments = read_record(directory), stored_arguments(directory)
    if record is None or not arguments:
        yield _command("--info", str(shown)), "everything about its files"
        return
    n_epochs = record.get("epoch") if record.get("state") == ENDED else None
    cfg = read_plain_yaml(directory / CONFIG_FILE)
    yield resume_command(arguments, cfg, shown, n_epochs), "train on" if n_epochs else "go on where it stopped"


# -- the report --------------------------------------------------------------------------------------------------------


def report_writer(directory: Path, project: Path) -> ReportWriter:
    """Return what keeps the report of a run that begins.

    :param directory: Of the run, with its configuration and command in it.
    :param project: Where the command was started; commands that continue from the run are meant to be given there.
    """
    from maze.report.report_writer import ReportWriter

    return ReportWriter(directory, facts_of(directory, project), _resumed(directory))


def _resumed(directory: Path) -> Progress | None:
    """The statistics of the run that this one resumes, if it does."""
    from maze.report.progress import read_progress

    cfg = read_plain_yaml(directory / CONFIG_FILE)
    if not cfg.get("resume") or not cfg.get("input_dir"):
        return None
    try:
        return read_progress(Path(str(cfg["input_dir"])))
    except MazeError:
        return None


def facts_of(directory: Path, project: Path) -> RunFacts:
    """Return what is known about a run besides its statistics; what cannot be read is left out.

    :param directory: Of the run.
    :param project: Directory that commands are meant to be given in.
    """
    from maze.report.run_page import RunFacts

    directory = directory.absolute()
    cfg = read_plain_yaml(directory / CONFIG_FILE)
    command = directory / COMMAND_FILE
    return RunFacts(
        name="/".join(directory.parts[-2:]),
        title=title_of(directory, cfg),
        started=datetime.fromtimestamp(command.stat().st_mtime) if command.is_file() else None,
        facts=list(_facts(directory, cfg)),
        settings=[(key, value, None) for key, _, value in (text.partition("=") for text in _overrides(directory))],
        config=text_of(directory / CONFIG_FILE),
        commands=list(_commands(stored_arguments(directory), cfg, shown_path(directory, project))),
    )


def _facts(directory: Path, cfg: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    choices = chosen_options(directory)
    choices["env"] = environment_option(choices.get("env"), cfg.get("env"))
    yield from ((group, str(choices[group])) for group in _GROUPS if choices.get(group))
    versions, commit = _versions(directory) or ({}, "")
    shown = ", ".join(f"{name} {versions[name]}" for name in _SHOWN_VERSIONS if versions.get(name))
    rows = {"seeds": _seeds(cfg), "began with": str(cfg.get("input_dir") or ""), "versions": shown, "git": commit}
    yield from ((label, text) for label, text in rows.items() if text)


def _commands(arguments: Sequence[str], cfg: Mapping[str, Any], shown: Path) -> Iterator[tuple[str, str]]:
    if arguments:
        yield "Run it again", again_command(arguments)
        yield "Go on where it stopped", resume_command(arguments, cfg, shown)
    yield "Watch its best policy", _command("--play", str(shown))
    yield "Look at its decisions, step by step", _command("-cn", "conf_inspect", f"policies=[{value_text(shown)}]")
    yield "Compare it with others in the same episodes", _compare_command(shown)
    yield "Everything about its files", _command("--info", str(shown))


def _overrides(directory: Path) -> list[str]:
    """What the command of a run has set."""
    try:
        overrides = yaml.safe_load(text_of(directory / HYDRA_CONFIG.parent / "overrides.yaml"))
    except yaml.YAMLError:
        return []
    return [str(override) for override in overrides] if isinstance(overrides, list) else []


# -- the list of runs --------------------------------------------------------------------------------------------------


class ListedRun(NamedTuple):
    """A training, as it is listed."""

    run: str
    environment: str
    algorithm: str
    steps: str
    best_score: str
    state: str
    date: str


def print_runs(arguments: Sequence[str]) -> int:
    """Print a table of the trainings below a directory, the newest last; checkpoints are not read.

    :param arguments: The directory.
    :return: Exit status.
    :raises UsageError: It is no directory.
    """
    directory = Path(*arguments)
    if not directory.is_dir():
        raise UsageError(f"--runs: {directory} is no directory. Name the one that runs are written to: outputs.")
    found = [(run, read_plain_yaml(run / CONFIG_FILE)) for run in runs_below(directory, [CONFIG_FILE])]
    found.sort(key=lambda entry: (entry[0] / CONFIG_FILE).stat().st_mtime)
    runs = [_listed(run, cfg) for run, cfg in found if "algorithm" in cfg]
    if runs:
        rows = [ListedRun(*(name.replace("_", " ") for name in ListedRun._fields)), *runs]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    else:
        print(f"No trainings in {directory}; maze-run -cn conf_train makes one.")
    if others := len(found) - len(runs):
        print(f"Not shown: {others} rollout{'s' if others > 1 else ''} or other jobs.")
    if runs:
        print("maze-run --info <run> says more about one, and how to go on with it.")
    return 0


def _listed(run: Path, cfg: Mapping[str, Any]) -> ListedRun:
    record = record_of(run) or {"state": "starting"}
    steps, score = record.get("n_env_steps"), record.get("best_score")
    broken = f" (broken by {record['violation']:.3g})" if record.get("violation") else ""
    return ListedRun(
        run=str(run),
        environment=environment_name(cfg.get("env")),
        algorithm=algorithm_name(cfg["algorithm"], run),
        steps=f"{steps:,}" if isinstance(steps, int) and steps else "-",
        best_score=f"{score:.5g}{broken}" if isinstance(score, int | float) else "-",
        state=str(record.get("state")),
        date=datetime.fromtimestamp((run / CONFIG_FILE).stat().st_mtime).strftime("%Y-%m-%d %H:%M"),
    )


# -- the description of a run ------------------------------------------------------------------------------------------


def print_run_info(arguments: Sequence[str]) -> int:
    """Print what is known about a run or a sweep.

    :param arguments: Its directory, as it was given.
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
        # Where the choices are lost, the configuration itself says what was used.
        rows += [*_components(cfg, chosen_options(directory)), *_progress(directory, cfg, files)]
    lines += [_row(label, text) for label, text in rows if text]
    lines += ["", "Files", *([file.line() for file in files] or ["  (none)"])]
    return [*lines, "", "Go on", *_ways_on(directory, cfg, files)]


def _row(label: str, text: str) -> str:
    return f"  {label:<13}{text}"


def _stored_config(directory: Path) -> tuple[DictConfig | None, str]:
    """The configuration of the run, or what is wrong with it."""
    for name in (Path(CONFIG_FILE), HYDRA_CONFIG):  # the seeds that were drawn are only in the former
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
    """Whether it is the configuration of a training with RLlib, which has checkpoints of Ray's instead of latest.pt."""
    return str(OmegaConf.select(cfg, "runner._target_") or "").startswith("maze.rllib.")


def _times_and_versions(directory: Path) -> Iterator[tuple[str, str]]:
    stamps = [path.stat().st_mtime for path in directory.iterdir() if path.is_file()]
    if stamps:
        first, last = (f"{datetime.fromtimestamp(stamp):%Y-%m-%d %H:%M:%S}" for stamp in (min(stamps), max(stamps)))
        yield "time", f"first file {first}, last change {last}"
    found = _versions(directory)
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
            continue  # the model brings one of its own
        option, choice = choice, environment_option(choice, section) if group == "env" else choice
        details: list[str] = []
        if isinstance(section, dict) and group == "wrappers":
            details = [str(name).rpartition(".")[2] for name in section]
        elif isinstance(section, dict) and section.get("_target_") and not (group == "algorithm" and choice):
            details = [str(section["_target_"])]
        if isinstance(section, dict) and group == "env":
            left_over = gym_env_defaults() if choice != option else {}  # arguments of the default environment
            shown = {key: value for key, value in section.items() if key != "_target_" and value not in (None, "???")}
            values = {key: value for key, value in shown.items() if value != left_over.get(str(key), ...)}
            details += [f"{key!s}={value}" for key, value in values.items() if not isinstance(value, (dict, list))]
        if choice or details:
            yield group, f"{choice or '(own)'}{': ' if details else ''}{', '.join(details)}"
    yield "seeds", _seeds(plain)


def _progress(directory: Path, cfg: DictConfig, files: Sequence[CheckedFile]) -> Iterator[tuple[str, str]]:
    """State, progress and best score of a training."""
    if "algorithm" not in cfg:
        return
    record = record_of(directory) or {}
    steps, score = record.get("n_env_steps"), record.get("best_score")
    if record:
        yield "state", f"{record.get('state')}{f', {steps:,} environment steps' if isinstance(steps, int) else ''}"
    is_rllib, state = _is_rllib(cfg), _state_in(files)
    if is_rllib and not record:
        yield "progress", f"unknown: there is no {_PROGRESS_OF_RLLIB}; it is written with the first checkpoint of Ray's"
    elif not is_rllib and state is None:
        yield "progress", "unknown: there is no readable latest.pt; it is written when the first epoch ends"
    else:
        is_ended = record.get("state") == ENDED if state is None else state.get("is_finished")
        total = None if is_rllib else OmegaConf.select(cfg, "algorithm.n_epochs")
        done = f"{(state or record).get('epoch', '?')}{f' of {total}' if total else ''}"
        end = "the training came to its end" if is_ended else "stopped before its end"
        yield "progress", f"{done} {'iterations' if is_rllib else 'epochs'} done, {end}"
    if isinstance(score, int | float):
        violation = record.get("violation")
        yield "best score", f"{score:.5g}{f', constraints broken by {violation:.5g}' if violation else ''}"


def _state_in(files: Sequence[CheckedFile]) -> Mapping[str, Any] | None:
    return next((file.state for file in files if file.state is not None), None)


def _ways_on(directory: Path, cfg: DictConfig | None, files: Sequence[CheckedFile]) -> list[str]:
    if cfg is None:
        return ["  Without its configuration neither command can be given."]
    usable = {file.name for file in files if not file.problem}
    state = _state_in(files) or {}
    n_finished = int(state.get("epoch", 0)) if state.get("is_finished") else None
    arguments, shown = stored_arguments(directory), shown_path(directory, Path.cwd())
    lines: list[str] = []
    if "algorithm" in cfg:
        if "latest.pt" in usable:
            title = "Train on, for as many epochs again" if n_finished else "Resume the training"
            lines += [f"  {title}:", f"    {resume_command(arguments, cfg, shown, n_finished)}"]
        needed = ["state_dict.pt", "spaces_config.pkl"]
        if usable.issuperset(needed):
            lines += ["  Roll the best policy out:", f"    {_rollout_command(arguments, shown)}"]
        missing = [name for name in (needed if _is_rllib(cfg) else ["latest.pt", *needed]) if name not in usable]
        if missing:
            lines.append(f"  Missing or damaged, and needed for that: {', '.join(missing)}.")
            others = sorted(name for name in usable if name.endswith(".pt") and name not in missing)
            lines += [f"  Readable checkpoints: {', '.join(others)}."] if others else []
    else:
        lines += ["  Run it again:", f"    {again_command(arguments)}"]
    if "progress.csv" in usable:
        lines += ["  Make its report:", f"    {_command('--report', str(shown))}"]
    if any(file.name.startswith("events.out.tfevents") for file in files):
        lines += ["  Look at its statistics:", f"    tensorboard --logdir {shlex.quote(str(shown))}"]
    return lines


def _describe_sweep(directory: Path) -> list[str]:
    runs = sorted((run.parent for run in directory.glob(f"*/{CONFIG_FILE}")), key=lambda run: (len(run.name), run.name))
    shown = shown_path(directory, Path.cwd())
    lines = [f"Sweep in {directory.absolute()}", "", _row("runs", str(len(runs)))]
    lines += [_row(run.name, " ".join(_overrides(run)) or "(no overrides)") for run in runs]
    lines += ["", "Go on"]
    for name, what in (("results.csv", "Results of all runs"), ("jobs.csv", "What became of the jobs")):
        lines += [f"  {what}: {shown / name}"] if (directory / name).is_file() else []
    if runs:
        lines += ["  A single run:", f"    {_command('--info', str(shown / runs[0].name))}"]
    if (directory / STUDY_FILE).is_file():
        lines.append(f"  Run what is left: the same command with hydra.sweep.dir={shlex.quote(str(shown))}")
    lines += ["  Make the report:", f"    {_command('--report', str(shown))}"]
    return [*lines, "  Look at the statistics:", f"    tensorboard --logdir {shlex.quote(str(shown))}"]


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
    """A file, or a directory of files, and what is wrong with it.

    :param name: Relative to the directory of the run.
    :param size: In bytes.
    :param kind: What it is.
    :param problem: What is wrong with it; empty: nothing.
    :param state: The state of the training, where the file holds it.
    """

    name: str
    size: int
    kind: str
    problem: str = ""
    state: Mapping[str, Any] | None = None

    def line(self) -> str:
        """Return a line of a table."""
        size = f"{self.size} B"
        for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
            if self.size >= factor:
                size = f"{self.size / factor:.1f} {unit}"
                break
        return f"  {self.name:<40} {size:>9}  {self.kind}: {f'DAMAGED: {self.problem}' if self.problem else 'valid'}"


def checked_files(directory: Path) -> list[CheckedFile]:
    """Read and check all files in the directory of a run that matter."""
    files = [_checked(path) for path in sorted(directory.iterdir()) if path.is_file() and not path.name.startswith(".")]
    folders = [_checked_folder(directory / name, kind) for name, kind in _DIRECTORIES.items()]
    leftovers = [
        CheckedFile(path.name, path.stat().st_size, "left behind by a write that was interrupted; it can be deleted")
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
            state = content if isinstance(content, Mapping) else None
            found = f"state of the training after epoch {state.get('epoch', '?')}" if state else content or kind
            return CheckedFile(path.name, size, str(found), "", state)
    return CheckedFile(path.name, size, "other file (not checked)")


def _read_checkpoint(path: Path) -> Mapping[str, Any] | str:
    from maze.core.utils.checkpoint import load_state
    from maze.train.utils.plain_state import STATE_FORMAT

    state = load_state(path)
    return state if STATE_FORMAT in state else f"weights{' of the best model' if path.name == 'state_dict.pt' else ''}"


def _read_spaces(path: Path) -> None:
    from maze.perception.models.space_config import SpacesConfig

    SpacesConfig.load(path)


def _read_statistics(path: Path) -> None:
    from maze.core.wrappers.observation_normalization.normalization_strategies.base import load_statistics

    load_statistics(path)


def _read_events(path: Path) -> str:
    from maze.utils.tensorboard_reader import read_event_file

    content = read_event_file(path)
    if content.n_damaged:
        raise MazeError(
            f"{content.n_lost_bytes} bytes in {content.n_damaged} places cannot be read; {len(content.events)} records "
            "can."
        )
    return f"TensorBoard statistics, {len(content.events)} records"


def _read_yaml(path: Path) -> None:
    read_yaml(path)


def _read_json(path: Path) -> None:
    json.loads(path.read_text(encoding="utf-8"))


def _read_text(path: Path) -> None:
    path.read_text(encoding="utf-8")


_READERS: tuple[tuple[str, str, Callable[[Path], Mapping[str, Any] | str | None]], ...] = (
    ("*.pt", "checkpoint", _read_checkpoint),
    ("spaces_config.pkl", "action and observation spaces", _read_spaces),
    ("statistics*.pkl", "statistics for observation normalization", _read_statistics),
    ("events.out.tfevents.*", "TensorBoard statistics", _read_events),
    ("*.yaml", "settings", _read_yaml),
    ("versions.json", "versions", _read_json),
    ("run.json", "how far the training is", _read_json),
    ("progress.csv", "table of all statistics", _read_text),
    ("report.html", "report, for a browser", _read_text),
    (_PROGRESS_OF_RLLIB, "progress of the training", _read_json),
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
    """Whether a pickle or an archive is complete; nothing in it is executed. Other files pass."""
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
