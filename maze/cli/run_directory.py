"""The directory of a run: claimed for one run, described so that it can be repeated, found and read again."""

from __future__ import annotations

import itertools
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from maze.cli.errors import RunFailedError, UsageError, tell_from_verdict
from maze.cli.sweeps.results import PREVIOUS_FORMAT, STUDY_FILE, has_study
from maze.cli.wrapper_overrides import apply_overrides, as_written
from maze.core.errors import ConfigError
from maze.core.utils.config_description import config_to_yaml
from maze.core.utils.config_utils import gym_env_defaults
from maze.core.utils.files import write_whole
from maze.core.utils.storage import Store, Uploads, is_url, working_directory
from maze.utils.process import version_of

CLAIM = ".hydra"
"""Hydra's subdirectory, created exclusively: whoever creates it owns the directory around it."""

WORTHLESS = (
    "hydra_config.yaml",
    "command.txt",
    "versions.json",
    "run.json",
    "progress.csv",
    "report.html",
    "maze_cli.log",
    "multirun.yaml",
    "spaces_config.pkl",
    "*.pdf",
    ".maze-unfinished-*",
    "events.out.tfevents.*",
)
"""What a run writes before it has achieved anything."""

_claimed: ContextVar[list[ClaimedDirectory] | None] = ContextVar("maze_claimed_directories", default=None)


@dataclass(frozen=True)
class ClaimedDirectory:
    """A directory that belongs to one run."""

    path: Path
    created: tuple[Path, ...] = ()
    """The directory and its parents, as far as the claim created them; innermost first."""
    foreign: frozenset[str] = frozenset()
    """Names of what lay in the directory before."""
    store: Store | None = None
    """Where its files go besides."""

    def remove_if_worthless(self) -> bool:
        """Removes it, unless it holds something that its run achieved; what is not the run's own is left alone.

        :return: Whether it was removed.
        """
        if not self.path.is_dir():
            return False
        files = [path for path in self._own_paths() if not path.is_dir()]
        if not all(_is_worthless(path) for path in files):
            return False
        for path in files:
            path.unlink(missing_ok=True)
        # The claim goes last: as long as it is there, nobody else moves in.
        claim = self.path / CLAIM
        for path in sorted(self._own_paths(), key=lambda path: (path == claim, -len(path.parts))):
            path.rmdir()
        with suppress(OSError):  # somebody else's files are in it
            for path in self.created:
                path.rmdir()
        return True

    def _own_paths(self) -> Iterator[Path]:
        for entry in self.path.iterdir():
            if entry.name not in self.foreign:
                yield entry
                if entry.is_dir() and not entry.is_symlink():
                    yield from entry.rglob("*")


def _is_worthless(path: Path) -> bool:
    return path.parent.name == CLAIM or any(path.match(pattern) for pattern in WORTHLESS)


def claim_directory(requested: Path, n_attempts: int = 5) -> ClaimedDirectory:
    """Creates a directory that no other run uses or has used.

    :param requested: Taken if it is free; else `_02`, `_03`, ... is appended, which keeps names sorted by time.
    :param n_attempts: How often other runs may get in the way.
    :raises ConfigError: It holds a run already, is a file, or cannot be created.
    """
    requested = requested.absolute()
    for number in itertools.count(1):
        directory = requested if number == 1 else requested.with_name(f"{requested.name}_{number:02d}")
        created = tuple(path for path in (directory, *directory.parents) if not path.exists())
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / CLAIM).mkdir()
        except FileExistsError:
            if Path.cwd().is_relative_to(directory):
                raise ConfigError(
                    f"hydra.run.dir: {directory} holds an earlier run already (its {CLAIM} exists). "
                    f"Name another directory, or leave hydra.run.dir out."
                ) from None
            if not directory.is_dir():
                raise ConfigError(f"hydra.run.dir: {directory} is a file; name a directory.") from None
        except OSError as error:
            if isinstance(error, FileNotFoundError) and n_attempts > 1:
                # A failing run removed the directory in between; the same name is free now.
                return claim_directory(requested, n_attempts - 1)
            raise ConfigError(
                f"Cannot create the run directory {directory}: {error.strerror}. "
                f"Choose another place with log_base_dir=<directory>."
            ) from error
        else:
            foreign = frozenset(path.name for path in directory.iterdir()) - {CLAIM}
            return ClaimedDirectory(directory, created, foreign)
    raise AssertionError("unreachable")


def _store_of(url: str, key: str) -> Store:
    """The place on shared storage where a run is to be."""
    if key != "hydra.run.dir":
        raise ConfigError(
            f"{key}: {url} is a URL. The jobs of a sweep need a directory of a file system that all of them share; "
            "only the directory of a single run can be a URL."
        )
    store = Store(url, key)
    store.require_free()
    return store


def uploads_of_run(directory: Path) -> Uploads | None:
    """Uploads the files of a run that works in a claimed directory; `None`: they stay there."""
    stores = [claimed.store for claimed in _claimed.get() or () if claimed.path == directory]
    return Uploads(directory, stores[0]) if stores and stores[0] is not None else None


@contextmanager
def _own_environment_as_choice(config: DictConfig) -> Iterator[None]:
    """Within this block, one's own environment (`env._target_`) stands among the choices instead of the default."""
    choices = config.hydra.runtime.choices
    option = choices.get("env")
    with read_write(config.hydra), open_dict(config.hydra):
        choices.env = environment_option(option, config.get("env"))
    try:
        yield
    finally:
        with read_write(config.hydra), open_dict(config.hydra):
            choices.env = option


class ClaimedDirectories:
    """Context that knows which directories were claimed in it."""

    def __init__(self) -> None:
        self.directories: list[ClaimedDirectory] = []

    def __enter__(self) -> ClaimedDirectories:
        self._token = _claimed.set(self.directories)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _claimed.reset(self._token)

    def remove_worthless(self) -> None:
        """Removes those in which nothing was achieved."""
        for directory in self.directories:
            directory.remove_if_worthless()


def _announce(config: DictConfig) -> None:
    """Print what starts, before the imports and the checks of the run, which take seconds."""
    if config.get("verbose") == 0:
        return
    chosen = config.hydra.runtime.choices
    groups = [f"{name}={chosen[name]}" for name in ("env", "algorithm", "policy", "runner") if chosen.get(name)]
    print(f"-> starting {' '.join(['-cn', str(config.hydra.job.config_name), *groups])}", flush=True)


class RunDirectoryCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Claims `hydra.run.dir` or `hydra.sweep.dir` before Hydra creates it; its name tells what is chosen by then."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        from maze.cli.stored_model import choose_stored_environment

        self._apply_overrides(config)
        choose_stored_environment(config)
        _announce(config)
        if "algorithm" in config:
            from maze.cli.critic_choice import choose_critic

            choose_critic(config)
        self._claim(config, "hydra.run.dir")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._apply_overrides(config)
        self._claim(config, "hydra.sweep.dir", is_resumable=has_study)

    @staticmethod
    def _apply_overrides(config: DictConfig) -> None:
        config.hydra.overrides.task = as_written(config.hydra.overrides.task)
        try:
            apply_overrides(config)
        except (ConfigError, HydraException) as error:
            raise RunFailedError from error

    @staticmethod
    def _claim(config: DictConfig, key: str, is_resumable: Callable[[Path], bool] | None = None) -> None:
        hydra_config = HydraConfig.instance()
        previous = hydra_config.cfg
        with _own_environment_as_choice(config):
            hydra_config.set_config(config)  # the names contain ${hydra:...}
        try:
            named = str(OmegaConf.select(config, key))
            store = _store_of(named, key) if is_url(named) else None
            base = Path(str(config.get("log_base_dir") or "outputs"))
            requested = (Path(named) if store is None else working_directory(named, base)).absolute()
            is_resumed = is_resumable is not None and is_resumable(requested)
            # a sweep that goes on keeps its directory, and its journal is locked as long as it runs
            directory = ClaimedDirectory(requested) if is_resumed else claim_directory(requested)
            directory = replace(directory, store=store)
        except ConfigError as error:
            tell_from_verdict(error, config)
            raise RunFailedError from error
        finally:
            hydra_config.cfg = previous
        with read_write(config.hydra), open_dict(config.hydra):
            OmegaConf.update(config, key, str(directory.path))
        directories = _claimed.get()
        if directories is not None and not is_resumed:
            directories.append(directory)


# -- what makes a run repeatable ---------------------------------------------------------------------------------------

PACKAGES = ("maze-rl", "torch", "numpy", "gymnasium", "hydra-core", "omegaconf", "pandas", "tensorboard", "ray")

CONFIG_FILE = "hydra_config.yaml"
COMMAND_FILE = "command.txt"
VERSIONS_FILE = "versions.json"
SWEEP_FILES = (STUDY_FILE, PREVIOUS_FORMAT, "multirun.yaml")
HYDRA_CONFIG = Path(".hydra") / "config.yaml"
_RUN_FILES = (HYDRA_CONFIG.as_posix(), CONFIG_FILE, COMMAND_FILE)


def command_line(arguments: Sequence[str]) -> str:
    """The command as it can be pasted into a shell."""
    return shlex.join(["maze-run", *as_written(arguments)])


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit, branch and whether files differ from the commit; None outside a repository or without git."""

    def git(*arguments: str) -> str | None:
        try:
            result = subprocess.run(
                ["git", "--no-optional-locks", *arguments],
                cwd=directory,
                capture_output=True,
                text=True,
                timeout=5,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    return {
        "commit": commit,
        "branch": git("rev-parse", "--abbrev-ref", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
    }


def installed_versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that influence results; None: not installed."""
    own = {"python": platform.python_version(), "platform": platform.platform()}
    return {**own, **{package: version_of(package) for package in PACKAGES}}


def config_as_yaml(cfg: DictConfig) -> str:
    """The configuration as it was composed, interpolations unresolved, in the order of its sections' names.

    Objects among its values are described by class and arguments.
    """
    return config_to_yaml(cfg, sort_keys=True)


def write_run_info(
    directory: Path,
    cfg: DictConfig,
    project: Path,
    arguments: Sequence[str] | None = None,
    taken_over: Sequence[str] = (),
) -> None:
    """Writes configuration, command and versions into a run directory.

    :param project: Where the command was started; its git state is recorded.
    :param arguments: Arguments of the command; those of this process by default.
    :param taken_over: Sections that came from an earlier run, which Hydra knows nothing of.
    """
    command = command_line(sys.argv[1:] if arguments is None else arguments)
    versions = {"versions": installed_versions(), "git": git_state(project)}
    for name, text in (
        (CONFIG_FILE, config_as_yaml(cfg)),
        (COMMAND_FILE, command + "\n"),
        (VERSIONS_FILE, json.dumps(versions, indent=2) + "\n"),
    ):
        write_whole(directory / name, text)
    _correct(directory / ".hydra" / "config.yaml", cfg, taken_over)


def _correct(file: Path, cfg: DictConfig, taken_over: Sequence[str]) -> None:
    """Has what Hydra wrote, by which policy and environment are built again later, say what was used.

    That is what came from an earlier run, and the distributions that the algorithm wants.
    """
    stored = OmegaConf.load(file) if file.is_file() else None
    if not isinstance(stored, DictConfig):
        return
    is_right = not taken_over
    for section in taken_over:
        stored[section] = cfg[section]
    if stored.get("model") and isinstance(cfg.get("model"), DictConfig):
        wanted = cfg.model.get("distribution_mapper_config")
        is_right &= stored.model.get("distribution_mapper_config") == wanted
        stored.model.distribution_mapper_config = wanted
    if not is_right:
        write_whole(file, OmegaConf.to_yaml(stored))


def read_plain_yaml(path: Path) -> dict[str, Any]:
    """A YAML file as plain containers, references in it unresolved; empty: it holds no mapping, or cannot be read.

    Only what YAML itself knows is built, with libyaml where it is there: ten times as fast as OmegaConf. Files of runs
    name nothing twice (`&name`, `*name`): one that does may be a few lines that unfold to more than memory holds.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        content = yaml.load(path.read_bytes(), loader)
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) and _is_tree(content) else {}


def _is_tree(content: Any) -> bool:
    """Whether no container in it is in it twice."""
    seen: set[int] = set()
    waiting = [content]
    while waiting:
        each = waiting.pop()
        if isinstance(each, (dict, list)):
            if id(each) in seen:
                return False
            seen.add(id(each))
            waiting += each.values() if isinstance(each, dict) else each
    return True


def text_of(path: Path) -> str:
    """What a text file holds, without blanks around it; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def stored_arguments(directory: Path) -> list[str]:
    """The arguments of the command that made a run; empty where they cannot be read."""
    try:
        return shlex.split(text_of(directory / COMMAND_FILE))[1:]
    except ValueError:
        return []


def shown_path(path: Path, project: Path) -> Path:
    """A path as it is written in the directory of the command: relative where it lies below."""
    path = path.absolute()
    return path.relative_to(project) if path.is_relative_to(project) else path


def chosen_options(directory: Path) -> dict[str, Any]:
    """Which option of each group a run was started with, as far as it is known."""
    found: Any = read_plain_yaml(directory / ".hydra" / "hydra.yaml")
    for key in ("hydra", "runtime", "choices"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


# -- finding a run -----------------------------------------------------------------------------------------------------


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
    runs = list(dict.fromkeys(runs_below(existing))) if existing != Path(existing.anchor) else []
    runs.sort(key=lambda run: run.stat().st_mtime, reverse=True)
    if existing != path:
        names = {run.relative_to(existing).as_posix(): run for run in runs}
        close = get_close_matches(path.relative_to(existing).as_posix(), names, n=5, cutoff=0.5)
        runs = [names[name] for name in close] or runs
    return [shown_path(run, Path.cwd()) for run in runs[:5]]


def runs_below(directory: Path, names: Sequence[str] = (CONFIG_FILE, *SWEEP_FILES)) -> Iterator[Path]:
    """Find directories of runs and sweeps in and below a directory, three levels deep.

    :param names: Files that a directory of those has to hold one of.
    """
    for depth in ("", "*/", "*/*/", "*/*/*/"):
        for name in names:
            for file in directory.glob(f"{depth}{name}"):
                if is_run(file.parent) or is_sweep(file.parent):
                    yield file.parent


def environment_option(option: Any, env: Any) -> Any:
    """Return the chosen option of the group `env`, or the name of `env._target_` where an own class replaces it.

    :param option: The option.
    :param env: The section `env` of the configuration.
    """
    target = env.get("_target_") if isinstance(env, Mapping) else None
    is_own = option == "gym_env" and target not in (None, gym_env_defaults()["_target_"])
    return str(target).rpartition(".")[2] if is_own else option
