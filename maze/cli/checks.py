"""Completion and checks of a composed configuration before components are built."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from maze.cli.errors import UsageError
from maze.cli.wrapper_overrides import for_hydra
from maze.console.runs import SHORT
from maze.core.errors import ConfigError
from maze.core.utils.config_utils import gym_env_defaults
from maze.core.utils.storage import local_copy

TYPED_SECTIONS = ("algorithm.", "runner.", "seeding.")
"""Sections whose values keep the type of their default; arguments of environments and models may have any type."""
FREE_SECTIONS = ("algorithm.config.",)
"""Sections among them that another framework checks: RLlib accepts schedules in place of numbers, for instance."""
_FILES_OF_POLICY = ("bundle", "path", "normalization")


def complete(cfg: DictConfig, project: Path) -> None:
    """Complete, in place, values without a default: absolute paths, seeds, the model's critic, the algorithm's
    distributions, and verbosity.

    :param project: Directory that relative paths refer to.
    """
    with open_dict(cfg):
        if "verbose" not in cfg:  # root configurations of users
            cfg.verbose = SHORT
        if cfg.get("input_dir"):
            cfg.input_dir = str(project / local_copy(str(cfg.input_dir), "input_dir"))
        _name_files(cfg.get("policy"), _FILES_OF_POLICY, project)
        for section in (cfg.get("env"), OmegaConf.select(cfg, "algorithm.rollout_evaluator")):
            _name_files(section, ("instances",), project)
        model = cfg.get("model")
        if isinstance(model, DictConfig):
            is_ours = "_target_" in model  # RLlib's own models have no such critic
            has_none = "critic" not in model or OmegaConf.is_interpolation(model, "critic")
            if is_ours and has_none:
                model.critic = "${critic}" if "critic" in cfg else None
            if is_ours:
                _use_distributions_of_algorithm(cfg)
        _draw_seeds(cfg)


def _name_files(section: Any, keys: Sequence[str], project: Path) -> None:
    """Make paths of files in a section absolute, if they are in the project's directory."""
    for key in keys if isinstance(section, DictConfig) else ():
        name = section.get(key)
        if isinstance(name, str) and (project / name).exists():
            section[key] = str((project / name).absolute())


def _use_distributions_of_algorithm(cfg: DictConfig) -> None:
    """Insert the distributions that the algorithm needs before those of the model."""
    from maze.train.trainers.common.config_classes import algorithm_class

    config_class = algorithm_class(cfg.get("algorithm"))
    configured = cfg.model.get("distribution_mapper_config")
    configured = list(configured.values() if isinstance(configured, Mapping) else configured or [])
    missing = [entry for entry in (config_class.distributions if config_class else ()) if entry not in configured]
    if missing:
        cfg.model.distribution_mapper_config = [*missing, *configured]


def _draw_seeds(cfg: DictConfig) -> None:
    import secrets

    seeding = cfg.get("seeding")
    if seeding is None:
        return
    if cfg.get("resume"):
        from maze.train.trainers.common.training_runner import resumed_seeds, stored_training

        seeding.update(resumed_seeds(stored_training(cfg), seeding))
    for key in ("env_base_seed", "agent_base_seed"):
        if seeding.get(key) is None:
            seeding[key] = secrets.randbits(31)


def check(cfg: DictConfig) -> None:
    """Raise a :class:`ConfigError` for missing or invalid values."""
    overrides = list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
    is_training = "algorithm" in cfg
    if is_training and cfg.get("model") is None:
        raise UsageError("model: training needs a model. Choose one, for instance model=flatten_concat.")
    target = (cfg.get("runner") or {}).get("_target_")
    if target is None or str(target).startswith("maze.core.rollout." if is_training else "maze.train.trainers."):
        chosen = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
        what = "runner: the chosen one cannot run this."
        if target is not None and is_training:
            what = f"runner={chosen.get('runner')} does not fit algorithm={chosen.get('algorithm')}."
        raise UsageError(
            f"{what} Training (-cn conf_train) takes runner=dev, runner=local or runner=ray, rollouts take "
            "runner=parallel, runner=sequential or runner=ray."
        )
    _check_own_critic(cfg, overrides)
    _check_value_types(cfg, overrides)
    _check_input_dir(cfg, is_training)


def _check_own_critic(cfg: DictConfig, overrides: Sequence[str]) -> None:
    model = cfg.get("model")
    chosen = next((override for override in overrides if override.startswith("critic=")), None)
    if chosen and isinstance(model, DictConfig) and not OmegaConf.is_interpolation(model, "critic"):
        raise UsageError(
            f"{chosen} has no effect: the chosen model has its own critic (model.critic). Remove critic=, or "
            f"write `critic: ${{critic}}` in the model's configuration."
        )


def _check_value_types(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Compare the types of overridden values with those of their defaults."""
    suspects: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        if (
            not key.startswith(TYPED_SECTIONS)
            or key.startswith(FREE_SECTIONS)
            or override.is_delete()
            or override.is_add()
        ):
            continue
        value = OmegaConf.select(cfg, key)
        if not isinstance(value, int) or isinstance(value, bool):
            suspects[key] = value
    if not suspects or not GlobalHydra.instance().is_initialized():
        return
    defaults = _defaults(overrides, exclude=set(suspects))
    for key, value in suspects.items():
        expected = _expected_type(OmegaConf.select(defaults, key), value)
        if expected:
            raise ConfigError(f"{key}: expected {expected}, got {value!r} ({type(value).__name__}).")


def _defaults(overrides: Sequence[str], exclude: set[str]) -> DictConfig:
    kept = for_hydra(text for text in overrides if text.partition("=")[0].strip("+~") not in exclude)
    return (
        GlobalHydra.instance()
        .config_loader()
        .load_configuration(config_name=HydraConfig.get().job.config_name, overrides=kept, run_mode=RunMode.RUN)
    )


def _expected_type(default: Any, value: Any) -> str | None:
    """Return the expected type of a value in place of this default; None: the value is valid."""
    if default is None or value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_whole = is_number and math.isfinite(value) and value == int(value)
    for kind, fits, name in (
        (bool, isinstance(value, bool), "true or false"),
        (int, is_whole, "a whole number"),
        (float, is_number, "a number"),
        (str, isinstance(value, str), "a text"),
        (DictConfig, isinstance(value, DictConfig), "a mapping"),
    ):
        if isinstance(default, kind):
            return None if fits else name
    return None


def _check_input_dir(cfg: DictConfig, is_training: bool) -> None:
    input_dir = cfg.get("input_dir")
    policy = cfg.get("policy")
    if is_training:
        wanted = [str(cfg.runner.get("state_dict_dump_file", "state_dict.pt")), "latest.pt"]
        way_out = "Runs of maze-run -cn conf_train write it."
    elif isinstance(policy, DictConfig) and "state_dict_file" in policy:
        wanted = [str(policy.state_dict_file)]
        way_out = f"Train first: maze-run -cn conf_train{_env_override(cfg)}"
        if not input_dir:
            raise UsageError(
                f"input_dir: {policy._target_} needs the directory of a training run: "
                f"input_dir=outputs/<name>/<time>. {way_out}"
            )
    else:
        return
    if not input_dir:
        return
    directory = Path(str(input_dir))
    if not directory.is_dir():
        raise UsageError(f"input_dir: {directory} is not a directory. {_newest_run_hint(directory.parent)}{way_out}")
    if not any((directory / name).is_file() for name in wanted):
        raise UsageError(
            f"input_dir: {directory} is not the directory of a training run: there is no {' or '.join(wanted)} in it. "
            f"{_newest_run_hint(directory)}{way_out}"
        )


def _env_override(cfg: DictConfig) -> str:
    """Return the override that names the environment of a configuration; empty for the default environment."""
    env = cfg.get("env")
    defaults = gym_env_defaults()
    if not isinstance(env, DictConfig) or env.get("name") in (None, defaults["name"]):
        is_own = isinstance(env, DictConfig) and env.get("_target_") not in (None, defaults["_target_"])
        return f" env._target_={env._target_}" if is_own else ""
    return f" env.name={env.name}"


def _newest_run_hint(directory: Path) -> str:
    """Return a sentence with the newest training run in or below a directory; empty if there is none."""
    patterns = ("*/state_dict.pt", "*/*/state_dict.pt")
    if not directory.is_dir() or directory == Path(directory.anchor):
        return ""
    runs = [path for pattern in patterns for path in directory.glob(pattern)]
    if not runs:
        return ""
    newest = max(runs, key=lambda path: path.stat().st_mtime).parent
    return f"Did you mean {newest}? "
