"""Composition of the configurations of a RunContext's runs."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.errors import HydraException
from hydra.types import RunMode as HydraRunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from maze.api.config_auditor import ConfigurationAuditor, as_wrapper_configs, is_plain, place
from maze.api.utils import InvalidSpecificationError, RunMode
from maze.cli.checks import check, check_critic, choose_critic, complete
from maze.cli.hydra_setup import apply_overrides, for_hydra, hydra_config, translated
from maze.cli.stored_runs import complete_base
from maze.core.errors import ConfigError
from maze.core.utils.config_utils import hydra_session, is_pettingzoo_name, value_text
from maze.core.utils.factory import TARGET_KEY, Factory
from maze.core.utils.import_guard import ImportGuard, current_guard
from maze.core.wrappers.wrapper import Wrapper
from maze.runner import Runner
from maze.train.trainers.common.config_classes import algorithm_class
from maze.train.trainers.common.training_runner import TrainingRunner

# Pattern of ids of gymnasium environments, as opposed to options of the group `env`.
_GYM_ID = re.compile(r"-v\d+$|[:/]")
ROLLOUT_SECTIONS = ("env", "wrappers", "model", "critic", "policy", "seeding", "runner", "input_dir", "log_base_dir")
"""Sections whose overrides also apply to rollouts."""

WEIGHTS = ("state_dict.pt", "latest.pt")


@dataclass(frozen=True)
class Choice:
    """One of the values of a component or override."""

    value: Any
    """The value as given."""
    texts: tuple[str, ...] = ()
    """Overrides for Hydra."""
    placed: tuple[tuple[str, Any], ...] = ()
    """Paths and values that are inserted into the composed configuration."""


@dataclass(frozen=True)
class LoadedRun:
    """The definition of a run."""

    number: int
    config: DictConfig
    """The job's configuration."""
    hydra: DictConfig
    """The configuration composed by Hydra, with Hydra's own section."""
    workdir: Path
    arguments: tuple[str, ...]
    """The equivalent arguments of a command line."""
    placed: tuple[str, ...]
    """Paths of objects, which have no equivalent on the command line."""
    swept: Mapping[str, Any]
    """Values that distinguish the run from the others of a multirun."""
    guard: ImportGuard | None = field(default_factory=current_guard)
    """Guard of imports for sections from an earlier run."""


@dataclass
class ConfigurationLoader:
    """Compose the configuration of each run and insert objects into it.

    :param auditor: The checked arguments.
    :param run_mode: Training or rollout.
    :param configuration: Name of the root configuration; `None`: the one of the run mode.
    :param experiment: Name of an experiment.
    :param run_dir: Directory to work in; `None`: a new one, named as on the command line.
    :param project: Directory that relative paths refer to.
    """

    auditor: ConfigurationAuditor
    run_mode: RunMode = RunMode.TRAINING
    configuration: str | None = None
    experiment: Any = None
    run_dir: str | Path | None = None
    project: Path = field(default_factory=Path.cwd)
    tracking: Any = None

    runs: list[LoadedRun] = field(default_factory=list, init=False, repr=False)
    """The runs, in the order of their numbers."""

    def load(self) -> None:
        """Compose all configurations.

        :raises ConfigError: Something is unknown, contradictory or of the wrong type.
        """
        axes = list(self._axes())
        varied = {name for name, options in axes if len(options) > 1}
        with hydra_session("maze.conf"):
            self.runs = []
            for number, choices in enumerate(itertools.product(*(options for _, options in axes))):
                swept = {name: choice.value for (name, _), choice in zip(axes, choices, strict=True) if name in varied}
                self.runs.append(self._load_run(number, list(choices), swept))

    @property
    def configs(self) -> list[DictConfig]:
        """The configuration of each run."""
        return [run.config for run in self.runs]

    @property
    def workdirs(self) -> list[str]:
        """The directory of each run; a suffix is appended if another run uses it by then."""
        return [str(run.workdir) for run in self.runs]

    # -- choices -----------------------------------------------------------------------------------------------

    def _axes(self) -> Iterator[tuple[str, list[Choice]]]:
        is_training = self.run_mode is RunMode.TRAINING
        for name in ("env", "wrappers", "algorithm", "model", "policy", "critic", "runner", "launcher"):
            value = self.auditor.kwargs.get(name)
            if value is not None and (is_training or name in ROLLOUT_SECTIONS):
                yield name, [self._component(name, option) for option in self._options(name, value)]
        if isinstance(self.tracking, Mapping) and is_training:
            yield "tracking", [Choice(self.tracking, placed=(("tracking", dict(self.tracking)),))]
        elif self.tracking is not None and is_training:  # a list is one choice: several trackers
            names = [self.tracking] if isinstance(self.tracking, str) else self.tracking
            if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
                raise InvalidSpecificationError(f"tracking: expected a name, names or a mapping, found {names!r}.")
            yield "tracking", [Choice(self.tracking, (f"tracking={value_text(names)}",))]
        if self.experiment is not None:
            options = self._options("experiment", self.experiment)
            yield "experiment", [Choice(option, (f"+experiment={option}",)) for option in options]
        for path, value in self.auditor.overrides.items():
            section = path.lstrip("+~").replace("/", ".").partition(".")[0]
            if is_training or section in ROLLOUT_SECTIONS:
                yield path, [self._override(path, option) for option in self._options(path, value)]

    def _options(self, path: str, value: Any) -> list[Any]:
        """Return the values of the runs; a list has several, for a multirun."""
        if not self.auditor.multirun or not isinstance(value, list | tuple):
            return [value]
        if not value:
            raise InvalidSpecificationError(f"overrides[{path!r}]: expected at least one value, found an empty list.")
        return list(value)

    def _component(self, name: str, value: Any) -> Choice:
        if isinstance(value, str):
            texts: tuple[str, ...] = (f"{'hydra/launcher' if name == 'launcher' else name}={value}",)
            if name == "env" and _GYM_ID.search(value):
                option = ("env=pettingzoo",) if is_pettingzoo_name(value) else ()
                texts = (*option, f"env.name={value_text(value)}")
            return Choice(value, texts)
        if name == "env" and isinstance(value, type):
            value = {TARGET_KEY: value}  # the run's files can name it
        if name == "wrappers":
            if isinstance(value, Wrapper):
                return Choice(value, placed=(("env", value), ("wrappers", {})))
            if isinstance(value, type):
                value = {value: {}}
            return self._placed(name, as_wrapper_configs(value) if isinstance(value, Mapping) else value)
        if name == "algorithm":
            return Choice(value, (f"algorithm={self.auditor.algorithm_name(value)}",), (("algorithm", value),))
        if name == "launcher" and not isinstance(value, Mapping):
            return Choice(value)
        return self._placed({"policy": "model.policy", "launcher": "hydra.launcher"}.get(name, name), value)

    def _override(self, path: str, value: Any) -> Choice:
        if path.startswith("~"):
            return Choice(value, (path if value is None else f"{path}={value_text(value)}",))
        if is_plain(value) and not self._is_below_object(path):
            return Choice(value, (f"{path}={value_text(value)}",))
        return self._placed(path, value)

    def _placed(self, path: str, value: Any) -> Choice:
        if self.auditor.multirun and path.startswith(("model", "critic", "runner")):
            value = copy.deepcopy(value)  # each run trains its own networks
        return Choice(value, placed=((path, value),))

    def _is_below_object(self, path: str) -> bool:
        """Return whether Hydra cannot resolve the path: through objects, class paths and lists."""
        keys = path.lstrip("+").split(".")
        is_below = any(path.lstrip("+").startswith(f"{other}.") for other in self.auditor.objects)
        return is_below or (len(keys) > 1 and (keys[0] == "wrappers" or any(key.isdigit() for key in keys)))

    # -- one run -----------------------------------------------------------------------------------------------

    def _load_run(self, number: int, choices: list[Choice], swept: dict[str, Any]) -> LoadedRun:
        texts = [text for choice in choices for text in choice.texts]
        placed = [placement for choice in choices for placement in choice.placed]
        earlier = self._earlier_run(number)
        if earlier is not None and not any(text.lstrip("+").startswith("input_dir=") for text in texts):
            texts.append(f"input_dir={value_text(earlier)}")
        if earlier is None and self.auditor.multirun and self.run_dir is not None:
            texts = [text for text in texts if text != "resume=true"]  # a run that had not begun starts
        name = self.configuration or self.run_mode.value
        try:
            full = compose(name, overrides=for_hydra(texts), return_hydra_config=True)
            apply_overrides(full)
            choose_critic(full)
            self._complete_hydra(full, number, placed, name)
            with hydra_config(full):
                config = self._job_config(full, texts, placed)
                workdir = self._workdir(full)
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            text = str(translated(error) or error)
            name, text = ("configuration: ", text.removeprefix("-cn ")) if text.startswith("-cn ") else ("", text)
            text = re.sub(r"write \+(\S+?)=<\w+>", r"use the key '+\1'", text)
            raise InvalidSpecificationError(f"{name}{text}") from error
        except InvalidSpecificationError:
            raise
        except ConfigError as error:
            hint = "" if self.auditor.multirun else " Lists stand for several runs: pass multirun=True."
            is_list = isinstance(self.auditor.overrides.get(str(error).partition(":")[0]), list | tuple)
            raise InvalidSpecificationError(f"{error}{hint if is_list else ''}") from error
        objects = tuple(path for path, value in placed)
        return LoadedRun(number, config, full, workdir, ("-cn", name, *texts), objects, swept)

    def _complete_hydra(self, full: DictConfig, number: int, placed: list[tuple[str, Any]], name: str) -> None:
        with read_write(full), open_dict(full):
            full.hydra.job.config_name = name
            if self.auditor.multirun:
                full.hydra.mode = HydraRunMode.MULTIRUN
                full.hydra.job.num = number
                full.hydra.job.id = f"{full.hydra.job.name}_{number}"
            full.hydra.runtime.cwd = str(self.project)
            for path, value in placed:
                if path in full.hydra.runtime.choices and path != "algorithm":  # its module is known
                    full.hydra.runtime.choices[path] = _short_name(value)
                if path.startswith("hydra."):
                    place(full, path, value)

    def _job_config(self, full: DictConfig, texts: list[str], placed: list[tuple[str, Any]]) -> DictConfig:
        config: DictConfig = OmegaConf.create(full, flags={"allow_objects": True, "struct": True})
        with read_write(config), open_dict(config):
            del config["hydra"]
        complete(config, self.project)
        check(config)
        with open_dict(config):
            for path, value in placed:
                if not path.startswith("hydra."):
                    place(config, path, value)
        complete_base(config, self.project, [*texts, *(path for path, _ in placed)])
        complete(config, self.project)
        if any(path == "critic" for path, _ in placed):
            check_critic(config, "critic")
        if self.run_mode is RunMode.TRAINING:
            if "algorithm" not in config:
                raise InvalidSpecificationError(
                    f"configuration: {self.configuration!r} is not a training configuration: it has no `algorithm`. "
                    "Choose another one, such as 'conf_train', or name a policy to roll out: policy='random_policy'."
                )
            _check_runner(config)
        return config

    def _workdir(self, full: DictConfig) -> Path:
        if not self.auditor.multirun:
            return self.project / str(self.run_dir or full.hydra.run.dir)
        # The names contain the time: all runs are below the directory of the first.
        is_first = not self.runs or self.run_dir is not None
        base = self.project / str(self.run_dir or full.hydra.sweep.dir) if is_first else self.runs[0].workdir.parent
        return base / Path(str(full.hydra.sweep.subdir)).name

    def _earlier_run(self, number: int) -> Path | None:
        """Return the run that is continued: the one in `run_dir`, if any."""
        if self.run_dir is None or self.run_mode is not RunMode.TRAINING:
            return None
        directory = self.project / self.run_dir / (str(number) if self.auditor.multirun else "")
        return directory if any((directory / name).is_file() for name in WEIGHTS) else None


def _check_runner(config: DictConfig) -> None:
    """Refuse a runner that does not train, or that trains another algorithm than the configured one."""
    runner = config.get("runner")
    is_object = isinstance(runner, Runner)
    kind = type(runner) if is_object else Factory(Runner).type_from_name(runner[TARGET_KEY], config_path="runner")  # type: ignore[type-abstract]
    if issubclass(kind, TrainingRunner):
        if (config_class := algorithm_class(config.algorithm)) is not None:
            config_class.from_config(config.algorithm)  # checks its values
            kind.trainer_for(config_class, (runner.trainer_class if is_object else runner.get("trainer_class")) or "")
        return
    if kind.__module__.startswith("maze.core.rollout."):  # others are the user's or RLlib's
        raise InvalidSpecificationError(
            f"runner: expected a training runner, found {kind.__name__}. Choose dev or local."
        )


def _short_name(value: Any) -> str:
    """Return the name of a component in names of directories."""
    if isinstance(value, Mapping):
        value = value.get(TARGET_KEY, "custom")
    name = value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)
    return "custom" if "<" in name else str(name).rpartition(".")[2]
