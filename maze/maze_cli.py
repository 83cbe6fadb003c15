"""The command line `maze-run`."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from string import Template
from types import FrameType
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from maze.cli.hydra_setup import (
    RunFailedError,
    UsageError,
    apply_overrides,
    config_groups,
    for_hydra,
    set_gate_status,
    translated,
    with_own_algorithm,
)
from maze.cli.run_directory import claimed_directories, has_results, uploads_of_run
from maze.cli.run_summary import beginning, command_text, ending, installed_versions, report_writer, write_run_info
from maze.console.streams import lasting_console, quiet_console
from maze.core.errors import ConfigError, EnvironmentFailedError, MazeError
from maze.core.log_stats.log_stats import LogStatsWriter, RunPlace, StatsContext
from maze.core.utils.config_utils import config_to_yaml, hydra_session, hydra_syntax
from maze.core.utils.files import is_url, uploaded
from maze.runner import Runner
from maze.utils.process import handlers_kept, one_numpy_thread

ROOT = "conf_rollout"
"""Root configuration of commands that name none."""
NOTHING = ("null", "~", "None", "", str(Path.home()))
"""Texts for an empty group; shells expand `~` to the home directory."""
OPTIONAL_GROUPS = ("critic", "wrappers")
PRINTING = ("verbose", "console")
"""Settings of the console output."""
FLAGS_WITH_VALUE = ("-cn", "--config-name", "-cp", "--config-path", "-cd", "--config-dir", "-p", "--package")
COMMANDS = {
    "--export": ("maze.cli.commands", "export_run"),
    "--info": ("maze.cli.commands", "print_run_info"),
    "--new-project": ("maze.cli.commands", "write_project"),
    "--report": ("maze.cli.commands", "make_report"),
    "--runs": ("maze.cli.run_summary", "print_runs"),
    "--shelf": ("maze.cli.commands", "print_shelf"),
}
"""Flags of commands that compose no configuration, with the functions that take the following arguments."""
REQUIRED_GROUPS = ("env", "algorithm", "model", "policy", "runner")


def maze_run(cfg: DictConfig) -> float | None:
    """Build and run the runner that a composed configuration describes.

    :param cfg: The whole configuration; `cfg.runner` describes the runner.
    :return: The objective of a sweep: the statistic that `hydra.sweeper.objective` names, or else the runner's best
        score, if any. Scores include the constraint violation (`BestScore`).
    """
    from maze.cli.sweeps.results import recorder_of_sweep
    from maze.console.runs import EVERYTHING, checked_verbosity
    from maze.core.rollout.recording import STATS_PATH
    from maze.core.utils.factory import Factory
    from maze.train.trainers.common.model_selection.best_model_selection import BestScore, best_score

    started_by_hydra = HydraConfig.initialized()
    project = Path(HydraConfig.get().runtime.cwd) if started_by_hydra else Path.cwd()
    _complete(cfg, project)
    if checked_verbosity(cfg.verbose) == EVERYTHING:
        print(config_to_yaml(cfg, sort_keys=True), flush=True)
    if started_by_hydra:
        write_run_info(Path.cwd(), cfg, project)
        print(beginning(Path.cwd(), project), flush=True)
    runner = Factory(Runner).instantiate(cfg.runner, config_path="runner")  # type: ignore[type-abstract]
    objective = recorder_of_sweep()
    start = time.monotonic()
    try:
        _run(runner, cfg, [] if objective is None else [objective], project if started_by_hydra else None)
    finally:
        error = sys.exc_info()[1]  # a directory without results is removed after an interruption
        if started_by_hydra and (error is None or (isinstance(error, KeyboardInterrupt) and has_results(Path.cwd()))):
            commands: dict[str, str] | None = {} if HydraConfig.get().mode == RunMode.MULTIRUN else None
            print(ending(Path.cwd(), project, time.monotonic() - start, commands), flush=True)
    score = best_score(runner)
    if objective is None:
        return score
    objective.write(STATS_PATH, 1, getattr(runner, "stats", None) or {})  # rollouts write to no writer
    value = objective.value()
    return None if value is None else BestScore(value, None if score is None else score.violation)


def _complete(cfg: DictConfig, project: Path) -> None:
    """Check a configuration, and complete it in place."""
    from maze.cli.checks import check, choose_critic, complete
    from maze.cli.stored_runs import complete_base, complete_policies, complete_replay, use_stored_run

    if HydraConfig.initialized():
        complete_base(cfg, project, HydraConfig.get().overrides.task)
    apply_overrides(cfg)
    complete(cfg, project)
    if "algorithm" in cfg:
        choose_critic(cfg)
    check(cfg)
    if not HydraConfig.initialized():
        return
    use_stored_run(cfg, HydraConfig.get().overrides.task)
    complete(cfg, project)
    if "policies" in cfg:
        complete_policies(cfg, project, HydraConfig.get().overrides.task)
    if "trajectory_data" in cfg and "what_if" in cfg:
        complete_replay(cfg, project, HydraConfig.get().overrides.task)


def _run(runner: Runner, cfg: DictConfig, writers: Iterable[LogStatsWriter], project: Path | None) -> None:
    """Run the runner in its own statistics context.

    :param project: Working directory of the command; `None`: write neither report nor log.
    """
    from maze.core.log_stats.log_stats_writer_console import LogStatsWriterConsole

    table = LogStatsWriterConsole(partial(_log_to_file, logging.INFO))
    with StatsContext() as stats, one_numpy_thread():
        if project is not None:
            hydra_config = HydraConfig.get()
            is_sweep = hydra_config.mode == RunMode.MULTIRUN
            group = "/".join((project / str(hydra_config.sweep.dir)).parts[-2:]) if is_sweep else ""
            stats.place = RunPlace(Path.cwd(), project, group)
        for writer in writers:
            stats.register_writer(writer)
        if project is not None and "algorithm" in cfg:
            stats.register_writer(table)
            stats.register_writer(report_writer(Path.cwd(), project))
        try:
            runner.setup(cfg)
            runner.run()
        finally:
            runner.close()
    if isinstance(rolled_out := getattr(runner, "stats", None), dict):
        table.write("rollout_stats", 1, rolled_out)


def _run_once(cfg: DictConfig) -> float | None:
    """Run as the task of Hydra, which catches the errors of a sweep's jobs and continues with the other jobs."""
    from maze.core.utils.import_guard import ImportGuard, imports_guarded

    with uploaded(uploads_of_run(Path.cwd())):  # the last line of the log is uploaded, too
        _log_to_file(logging.INFO, command_text(*sys.argv[1:]))
        try:
            with _quiet_if_configured(cfg), imports_guarded(ImportGuard(Path(HydraConfig.get().runtime.cwd))):
                score = maze_run(cfg)
        except BaseException as error:
            _log_to_file(logging.ERROR, "The run has failed or was interrupted.", error)
            set_gate_status(error, cfg)
            if isinstance(error, Exception) and HydraConfig.get().mode == RunMode.RUN:
                raise RunFailedError from error
            raise
        _log_to_file(logging.INFO, "The run has ended.")
        return score


@contextmanager
def _quiet_if_configured(cfg: DictConfig) -> Iterator[None]:
    """Return a context in which only warnings and errors are printed if `verbose` is 0."""
    if cfg.get("verbose", 1) != 0 or isinstance(cfg.verbose, bool):
        yield
        return
    with quiet_console():
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                handler.setLevel(logging.WARNING)
                handler.setStream(sys.stderr)
        yield


def _log_to_file(level: int, text: str, error: BaseException | None = None) -> None:
    """Write into `maze_cli.log` only; the console shows the same in another form."""
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("maze", level, __file__, 0, text, None, exc_info)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


@contextmanager
def _own_logging() -> Iterator[None]:
    """Return a context that restores the logging of the process and closes the run's `maze_cli.log`."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        for handler in set(root.handlers) - set(handlers):
            handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `maze-run` with these arguments (default: those of the process); return its exit status."""
    command = list(sys.argv[1:] if arguments is None else arguments)
    is_quiet = "--quiet" in command
    if is_quiet:
        command = [*(argument for argument in command if argument != "--quiet"), "verbose=0"]
    quiet = quiet_console() if is_quiet else nullcontext()
    with lasting_console(), quiet, _own_logging():
        return _main(command)


def _main(command: list[str]) -> int:
    if command == ["--version"]:
        print(f"maze-rl {installed_versions()['maze-rl'] or '(not installed)'}")
        return 0
    from maze.cli.hydra_setup import project_importable
    from maze.cli.stored_runs import remember_trust, split_trust
    from maze.core.utils.stored_config import trusted_here, trusting

    try:
        command, trusted = split_trust(command)
        if trusted and not command:
            return remember_trust(trusted)
    except MazeError as error:
        return _report(error, full=False)
    with trusting(trusted), project_importable(command, trusted_here()):
        flag, arguments = _split_flag(command)
        if flag in COMMANDS:
            return _run_flag(flag, arguments)
        return _compose_and_run(command, trusted)


def _compose_and_run(command: list[str], trusted: Sequence[str]) -> int:
    full_errors = any(os.environ.get(name) == "1" for name in ("MAZE_FULL_ERROR", "HYDRA_FULL_ERROR"))
    signals: list[int] = []
    with claimed_directories() as claimed:
        try:
            flag, arguments = _split_flag(command)
            if flag == "--play":
                from maze.cli.commands import play_command

                command = play_command(arguments)
            if trusted:  # for jobs in other processes as well
                command = [*command, f"++trusted_packages=[{','.join(trusted)}]"]
            overrides = for_hydra(with_own_algorithm([_readable_to_hydra(argument) for argument in command]))
            is_shown = any(argument.partition("=")[0] in ("--cfg", "-c") for argument in command)
            printed = _printed_with_wrappers() if is_shown and overrides != command else nullcontext()
            with _as_command_of_this_process(_flags_first(overrides), signals), printed:
                _run_hydra(overrides)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        except (Exception, KeyboardInterrupt, RunFailedError) as error:
            for directory in claimed:
                directory.remove_if_worthless()
            if signals or isinstance(error, KeyboardInterrupt):
                signum = signal.Signals(signals[0] if signals else getattr(error, "signum", signal.SIGINT))
                text = str(error) if isinstance(error, KeyboardInterrupt) else ""
                print(f"maze-run: {text or f'interrupted by {signum.name}.'}", file=sys.stderr)
                return 128 + signum
            return _report(error.__cause__ if isinstance(error, RunFailedError) else error, full_errors)
    return 0


def _split_flag(command: Sequence[str]) -> tuple[str, list[str]]:
    """Return the first argument without its value, and the value and the following arguments."""
    flag, equals, value = command[0].partition("=") if command else ("", "", "")
    return flag, [*([value] if equals else []), *command[1:]]


def _run_flag(flag: str, arguments: list[str]) -> int:
    from importlib import import_module

    module, name = COMMANDS[flag]
    try:
        function: Callable[[list[str]], int] = getattr(import_module(module), name)
        return function(arguments)
    except SystemExit:  # --help
        return 0
    except MazeError as error:
        return _report(error, full=False)
    except OSError as error:
        return _report(UsageError(f"{flag}: {error.filename or 'a file'}: {error.strerror or error}."), full=False)


def _run_hydra(command: Sequence[str]) -> None:
    """Run a command. Hydra's main composes the configuration twice, which only sweeps and flags of Hydra need."""
    from maze.cli.hydra_setup import defaults_of_maze

    with defaults_of_maze(), hydra_syntax() as version_base:
        # If a file and `algorithm._target_` name the same class, the file is merged into the class's defaults, as
        # intended. Hydra warns about it at each composition.
        warnings.filterwarnings("ignore", r"\s*'algorithm/[\w-]+' is validated against ConfigStore schema")
        others = [argument for argument in command if argument not in ("--help", "-h")]
        run = _run_single if len(others) == len(command) else _print_help
        if (single := _root_and_overrides(others)) is not None and run(*single):
            return
        # An absolute config path: Hydra searches no directory beside the script that started the process.
        hydra.main(version_base=version_base, config_path="pkg://maze.conf", config_name=ROOT)(_run_once)()


def _root_and_overrides(command: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return root configuration and overrides of a command that has no other flags and names no mode of Hydra."""
    root, overrides = ROOT, []
    arguments = iter(command)
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag in ("-cn", "--config-name"):
            root = value if equals else next(arguments, "")
        elif argument.startswith("-") or "hydra.mode" in flag:
            return None
        else:
            overrides.append(argument)
    return (root, overrides) if root else None


def _print_help(root: str, overrides: list[str]) -> bool:
    """Print the help of a root configuration; Hydra's own copies all configurations for each group that it lists.

    :return: Whether it was printed; Hydra knows more variables of the template.
    """
    with hydra_session("maze.conf", job_name="maze_cli") as session:
        cfg = hydra.compose(root, overrides, return_hydra_config=True)
        loader: Any = session.config_loader()
        groups = "".join(f"{group}: {', '.join(options)}\n" for group, options in config_groups(loader.repository))
    try:
        print(Template(cfg.hydra.help.template).substitute(APP_CONFIG_GROUPS=groups))
    except (KeyError, ValueError):
        return False
    return True


def _run_single(root: str, overrides: list[str]) -> bool:
    """Compose a configuration and run it.

    :return: Whether it was run; the configuration may choose Hydra's mode MULTIRUN, which Hydra refuses by an
        assertion before the task starts.
    """
    is_started = False

    def task(cfg: DictConfig) -> float | None:
        nonlocal is_started
        is_started = True
        return _run_once(cfg)

    with hydra_session("maze.conf", job_name="maze_cli") as session:
        assert session.hydra is not None
        try:
            session.hydra.run(config_name=root, task_function=task, overrides=overrides)
        except AssertionError:
            if is_started:
                raise
    return is_started


@contextmanager
def _printed_with_wrappers() -> Iterator[None]:
    """Return a context in which the overrides of wrappers are applied to the configuration that Hydra prints."""
    with redirect_stdout(io.StringIO()) as printed:
        yield
    cfg = OmegaConf.create(printed.getvalue())
    OmegaConf.set_struct(cfg, True)
    is_changed = isinstance(cfg, DictConfig) and apply_overrides(cfg)
    print(OmegaConf.to_yaml(cfg) if is_changed else printed.getvalue(), end="")


def _report(error: BaseException | None, full: bool) -> int:
    """Print an error: a message for errors caused by the user, a traceback for bugs."""
    assert error is not None
    message = error if isinstance(error, MazeError) else translated(error)
    if full or message is None:
        traceback.print_exception(error)
    elif isinstance(error, EnvironmentFailedError):  # the user's own code
        traceback.print_exception(error.__cause__)
    if message is None:
        return getattr(error, "exit_status", 1)
    kind = "ConfigError" if isinstance(message, ConfigError) else type(message).__name__
    print(f"{kind}: {message}", file=sys.stderr)
    return message.exit_status


@contextmanager
def _as_command_of_this_process(arguments: list[str], signals: list[int]) -> Iterator[None]:
    """Return a context in which Hydra reads these arguments from `sys.argv` and passes errors on unprinted.

    :param signals: Receives the signals that interrupt the command.
    """

    def interrupt(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)
        raise KeyboardInterrupt  # SIGTERM as well, so that resources are closed

    previous_argv, previous_setting = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    previous_format = warnings.formatwarning
    sys.argv = ["maze-run", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    warnings.formatwarning = lambda message, *args, **kwargs: f"Warning: {message}\n"
    try:
        with handlers_kept():
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, interrupt)
                if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                    signal.signal(signal.SIGINT, interrupt)
            yield
    finally:
        sys.argv = previous_argv
        warnings.formatwarning = previous_format
        HydraConfig.instance().cfg = None
        if previous_setting is None:
            os.environ.pop("HYDRA_FULL_ERROR", None)
        else:
            os.environ["HYDRA_FULL_ERROR"] = previous_setting


def _readable_to_hydra(argument: str) -> str:
    """Return an argument such as `critic=~` in Hydra's grammar."""
    name, equals, value = argument.partition("=")
    if equals and name.partition(".")[0] in PRINTING:
        return f"++{argument}"  # root configurations of users may lack it
    if is_url(value) and set(value) & set("?&="):
        return f"{name}='{value}'"
    if not equals and name.startswith("~"):
        name = name[1:]
    elif not equals or value not in NOTHING:
        return argument
    if name in REQUIRED_GROUPS:
        raise UsageError(f"{name}: cannot be left empty. Choose {name}=<option>; maze-run --help lists the options.")
    return f"~{name}" if name in OPTIONAL_GROUPS else argument


def _flags_first(arguments: Iterable[str]) -> list[str]:
    """Move overrides behind all flags; Python's parser does not accept overrides on both sides of a flag."""
    flags: list[str] = []
    overrides: list[str] = []
    previous = ""
    for argument in arguments:
        is_override = ("=" in argument and argument[0] != "-") or argument.startswith("~")
        (overrides if is_override and previous not in FLAGS_WITH_VALUE else flags).append(argument)
        previous = argument
    return [*flags, *overrides]


if __name__ == "__main__":
    sys.exit(main())
