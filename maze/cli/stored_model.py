"""Takes over what a stored run was configured with, where the command names nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from maze.cli.errors import UsageError
from maze.cli.wrapper_overrides import changed_wrappers
from maze.core.utils.factory import TARGET_KEY
from maze.core.utils.import_guard import NEVER_WHOLE
from maze.core.utils.stored_config import is_own_package
from maze.core.utils.stored_run import STORED_CONFIG, StoredRun, chosen_options, remember, remembered

TRUST = "--trust"
_ROOTS = ("conf_rollout", "conf_train")
"""Root configurations whose environment is a default."""


def use_stored_run(cfg: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Takes over, in place, what the run in `input_dir` was configured with, unless the command names it itself.

    That is the environment and the wrappers, where one of Maze's own root configurations is used without an experiment
    (others name them), and the model. Single wrappers that the command configures come on top of the run's. What is
    taken over may name the environments, networks and their parts of Maze and torch, and what is defined in the
    trusted packages: those that the command names (`trusted_packages`, its own classes, packages with configurations)
    and those that are remembered for the directory of the command.

    :param cfg: Configuration of a rollout or a training.
    :param overrides: The command's arguments, or the paths of what was given otherwise.
    :return: The sections that were taken over.
    :raises CheckpointError: The stored configuration cannot be read, or names other code.
    """
    directory = str(cfg.get("input_dir") or "")
    given = [override.lstrip("+~") for override in overrides]
    wanted = [section for section in _taken_over(cfg, given) if not _is_named(section, given)]
    if not directory or not wanted or not (Path(directory) / STORED_CONFIG).is_file():
        return []
    run = StoredRun(directory, [*packages_trusted_by(cfg), *_packages_named_in(cfg)])
    stored = run.sections(wanted)
    if "algorithm" in cfg and "model" in stored:
        stored["model"] = _model_for(cfg, stored["model"], run)
    if "wrappers" in stored:
        stored["wrappers"] = changed_wrappers(stored["wrappers"], _plain(cfg, "wrappers") or {})
    different = [section for section in stored if stored[section] != _plain(cfg, section)]
    with open_dict(cfg):
        for section in different:
            cfg[section] = stored[section]
    if different:
        names = " and ".join([", ".join(different[:-1]), different[-1]] if len(different) > 1 else different)
        choices = " ".join(f"{section}=<option>" for section in different)
        print(f"Using the {names} configuration of {directory}; name {choices} to choose another.")
    return different


def choose_stored_environment(cfg: DictConfig) -> None:
    """Enters, in place, the option of the environment that a command will take over from a run, as far as it is known.

    Directories are named after it. Until the run's configuration is judged, nothing else is taken over.

    :param cfg: The composed configuration, with Hydra's own section.
    """
    given = [override.lstrip("+~") for override in cfg.hydra.overrides.task]
    if _is_named("env", given) or "env" not in cfg.hydra.runtime.choices:
        return
    is_root = cfg.hydra.job.config_name in _ROOTS
    if is_root and any(override.startswith("experiment=") for override in given):
        return
    named = str(cfg.get("input_dir") or "") if is_root else _plain(cfg, "policies")
    for run in _texts_in(named):
        for directory in (Path(run), *sorted(Path(run).glob("*"))):  # of a training, or of several
            option = chosen_options(directory).get("env") if run else None
            if isinstance(option, str) and re.fullmatch(r"[\w-]+", option):  # a path could lead anywhere
                with read_write(cfg.hydra):
                    cfg.hydra.runtime.choices.env = option
                return


def _texts_in(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    for entry in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _texts_in(entry)


def _taken_over(cfg: DictConfig, given: Sequence[str]) -> list[str]:
    policy = cfg.get("policy")
    builds_model = "algorithm" in cfg or (isinstance(policy, DictConfig) and "model" in policy)
    own_root = HydraConfig.initialized() and HydraConfig.get().job.config_name not in _ROOTS
    is_chosen_elsewhere = own_root or any(override.startswith("experiment=") for override in given)
    sections = [] if is_chosen_elsewhere else [name for name in ("env", "wrappers") if name in cfg]
    if builds_model and "model" in cfg and not (is_chosen_elsewhere and "algorithm" in cfg):
        sections.append("model")
    return sections


def _is_named(section: str, given: Sequence[str]) -> bool:
    names = r"model|critic|policy\.model|env_model" if section == "model" else section
    ends = "[=@]|$" if section == "wrappers" else "[.=@]|$"  # single wrappers are added to those of the run
    return any(re.match(rf"({names})({ends})", override) for override in given)


def _model_for(cfg: DictConfig, model: Any, run: StoredRun) -> Any:
    """A stored model as the algorithm that goes on can train it.

    An algorithm that needs another kind of critic brings its own, and what the former one wanted of the distributions
    is left out. The latter is known of Maze's own algorithms alone; nothing else is imported by a stored name.
    """
    from maze.train.trainers.common.config_classes import algorithm_class

    stored, own = str(run.config.value("algorithm._target_")), cfg.algorithm
    before = algorithm_class({TARGET_KEY: stored}) if stored.startswith("maze.train.trainers.") else None
    after = algorithm_class(own)
    if before is after or not isinstance(model, dict):
        return model
    distributions = model.get("distribution_mapper_config")
    if before is not None and isinstance(distributions, list):
        model = {
            **model,
            "distribution_mapper_config": [entry for entry in distributions if entry not in before.distributions],
        }
    if before is None or after is None or before.critic != after.critic:
        model = {**model, "critic": _plain(cfg, "model.critic")}
    return model


def split_trust(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Takes `--trust <package>`, which every command knows, out of a command.

    :param command: The arguments of `maze-run`.
    :return: The other arguments, and the packages.
    :raises UsageError: A package is missing, or is none that can be trusted.
    """
    rest: list[str] = []
    packages: list[str] = []
    arguments = iter(command)
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if option != TRUST:
            rest.append(argument)
            continue
        for package in (value if equals else next(arguments, "")).split(","):
            if not package.isidentifier() or package in NEVER_WHOLE:
                raise UsageError(
                    f"{TRUST}: expected the name of a package of your own, {TRUST} my_project, found {package!r}."
                )
            packages.append(package)
    return rest, packages


def remember_trust(packages: Sequence[str]) -> int:
    """Trusts packages in all commands of the working directory from now on: `maze-run --trust <package>`, alone."""
    file = remember(Path.cwd(), packages)
    print(f"Trusted in {Path.cwd()}: {', '.join(remembered(Path.cwd()))}. Written into {file}; edit it to forget them.")
    return 0


def packages_trusted_by(cfg: DictConfig | None) -> list[str]:
    """Packages that a command trusts.

    Those are the ones that it names, those that are remembered for its directory, and those in which Hydra looks for
    configurations because of an installed search path plugin or of the command.

    :param cfg: The command's configuration, if any.
    """
    named = [] if cfg is None else list(cfg.get("trusted_packages") or ())
    if not HydraConfig.initialized():
        return named
    runtime = HydraConfig.get().runtime
    configured = [str(source.path).partition(".")[0] for source in runtime.config_sources if source.schema == "pkg"]
    return [*named, *configured, *remembered(Path(runtime.cwd))]


def _packages_named_in(cfg: DictConfig) -> list[str]:
    """Packages of the user's own whose classes and functions the command itself names: these run anyway."""
    targets = targets_in(OmegaConf.to_container(cfg, resolve=False))
    return [package for package in {target.partition(".")[0] for target in targets} if is_own_package(package)]


def targets_in(node: Any) -> Iterator[str]:
    """What a configuration of plain containers names as classes and functions, at any depth."""
    if isinstance(node, dict):
        if isinstance(node.get(TARGET_KEY), str):
            yield node[TARGET_KEY]
        node = list(node.values())
    if isinstance(node, list):
        for entry in node:
            yield from targets_in(entry)


def _plain(cfg: Any, key: str) -> Any:
    node = OmegaConf.select(cfg, key)
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
