"""Sections of a configuration that are taken over from a stored run, and trusted packages."""

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
"""Root configurations with a default environment."""


def use_stored_run(cfg: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Take over, in place, sections of the configuration of the run in `input_dir`, unless the command names them.

    These are the model, and, with Maze's own root configurations and without an experiment (others name them), the
    environment and the wrappers. Single wrappers that the command configures are added to the run's. The sections may
    name environments, networks and their parts of Maze and torch, and objects in trusted packages: those that the
    command names (`trusted_packages`, its own classes, packages with configurations) and those that are remembered for
    the working directory of the command.

    :param cfg: Configuration of a rollout or a training run.
    :param overrides: Arguments of the command, or paths of values given otherwise.
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
    """Enter, in place, the option of the environment that a command will take over from a run, if known.

    Directories are named after it. Nothing else is taken over before the run's configuration is checked.

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
        for directory in (Path(run), *sorted(Path(run).glob("*"))):  # of one run, or of several
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
    names_model = isinstance(policy, DictConfig) and "model" in {*policy, *(policy.get("base") or ())}
    builds_model = "algorithm" in cfg or names_model
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
    """Return a stored model for training with the configured algorithm.

    An algorithm that needs another kind of critic uses its own, and the distributions of the former algorithm are
    removed. These are known for Maze's own algorithms only; no other stored name is imported.
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
    """Remove `--trust <package>`, which every command accepts, from a command.

    :param command: The arguments of `maze-run`.
    :return: The other arguments, and the packages.
    :raises UsageError: A package is missing, or cannot be trusted.
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
                    f"{TRUST}: expected the name of your own package, such as {TRUST} my_project, found {package!r}."
                )
            packages.append(package)
    return rest, packages


def remember_trust(packages: Sequence[str]) -> int:
    """Trust packages in all further commands of the working directory: `maze-run --trust <package>` alone."""
    file = remember(Path.cwd(), packages)
    print(f"Trusted in {Path.cwd()}: {', '.join(remembered(Path.cwd()))}. Edit {file} to revoke trust.")
    return 0


def packages_trusted_by(cfg: DictConfig | None) -> list[str]:
    """Return the packages that a command trusts.

    These are the packages that it names, those remembered for its working directory, and those on Hydra's search path
    because of an installed plugin or of the command.

    :param cfg: The command's configuration, if any.
    """
    named = [] if cfg is None else list(cfg.get("trusted_packages") or ())
    if not HydraConfig.initialized():
        return named
    runtime = HydraConfig.get().runtime
    configured = [str(source.path).partition(".")[0] for source in runtime.config_sources if source.schema == "pkg"]
    return [*named, *configured, *remembered(Path(runtime.cwd))]


def _packages_named_in(cfg: DictConfig) -> list[str]:
    """Return the user's packages whose classes and functions the command names: their code is executed anyway."""
    targets = targets_in(OmegaConf.to_container(cfg, resolve=False))
    return [package for package in {target.partition(".")[0] for target in targets} if is_own_package(package)]


def targets_in(node: Any) -> Iterator[str]:
    """Yield the names of classes and functions in a configuration of plain containers, at any depth."""
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
