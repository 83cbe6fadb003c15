"""Completion of a composed configuration, choice of its critic, and checks, before components are built."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write

from maze.cli.hydra_setup import UsageError
from maze.console.runs import SHORT
from maze.core.errors import ConfigError
from maze.core.trajectory_recording.datasets.minari_data import PREFIX as MINARI
from maze.core.utils.factory import TARGET_KEY, Factory
from maze.core.utils.files import local_copy
from maze.train.trainers.common.config_classes import algorithm_class

_WAY_OUT = "Train first: maze-run -cn conf_train; maze-run --runs lists the runs below outputs."
_FILES = (
    *(f"{of}policy.{key}" for of in ("", "warm_start.") for key in ("bundle", "path", "normalization")),
    "env.instances",
    "algorithm.rollout_evaluator.instances",
)
_DATA = (
    "runner.dataset.dir_or_file",
    "runner.dataset.input_data",
    "runner.initial_demonstration_trajectories.input_data",
)


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
        for key in (*_FILES, *_DATA):
            _name_files(cfg, key, project)
        model = cfg.get("model")
        if isinstance(model, DictConfig) and "_target_" in model:  # RLlib's own models have no such critic
            if "critic" not in model or OmegaConf.is_interpolation(model, "critic"):
                model.critic = "${critic}" if "critic" in cfg else None
            _use_distributions_of_algorithm(cfg)
        _draw_seeds(cfg)


def _name_files(cfg: DictConfig, key: str, project: Path) -> None:
    """Make a path, or a list of paths, absolute.

    Runs change their working directory. Files that are not in the project's directory may be in that of an earlier run,
    and remain relative; data are always in the project's.
    """
    section = OmegaConf.select(cfg, key.rpartition(".")[0])
    given = OmegaConf.select(cfg, key) if isinstance(section, DictConfig) else None

    def absolute(name: Any) -> Any:
        is_path = isinstance(name, str) and not name.startswith(MINARI)
        return str((project / name).absolute()) if is_path and (key in _DATA or (project / name).exists()) else name

    found = [absolute(name) for name in given] if isinstance(given, ListConfig) else absolute(given)
    if found != given:
        OmegaConf.update(cfg, key, found)


def _use_distributions_of_algorithm(cfg: DictConfig) -> None:
    """Insert the distributions that the algorithm needs before those of the model."""
    config_class = algorithm_class(cfg.get("algorithm"))
    configured = cfg.model.get("distribution_mapper_config")
    configured = list(configured.values() if isinstance(configured, Mapping) else configured or [])
    missing = [entry for entry in (config_class.distributions if config_class else ()) if entry not in configured]
    if missing:
        cfg.model.distribution_mapper_config = [*missing, *configured]


def _draw_seeds(cfg: DictConfig) -> None:
    import secrets

    if (seeding := cfg.get("seeding")) is None:
        return
    if cfg.get("resume"):
        from maze.train.trainers.common.training_runner import resumed_seeds, stored_training

        seeding.update(resumed_seeds(stored_training(cfg), seeding))
    for key in ("env_base_seed", "agent_base_seed"):
        if seeding.get(key) is None:
            seeding[key] = secrets.randbits(31)


def choose_critic(cfg: DictConfig) -> None:
    """Replace, in place, a default critic of another kind than the algorithm needs.

    Critics that the command names or changes, and the critic of a model, are kept.

    :param cfg: The composed configuration. If it has Hydra's own section, the choice is entered there, since the run's
        directory is named after it; otherwise the overrides are those of `HydraConfig`.
    """
    from maze.perception.models.auto_model_composer import AutoModelComposer
    from maze.perception.models.critics import SharedStateCriticComposer, StepStateCriticComposer
    from maze.perception.models.critics.base_state_action_critic_composer import BaseStateActionCriticComposer
    from maze.perception.models.critics.base_state_critic_composer import BaseStateCriticComposer
    from maze.perception.models.model_composer import CRITIC_OPTIONS, BaseModelComposer, critic_composer_type
    from maze.perception.models.template_model_composer import TemplateModelComposer

    own_section = cfg.get("hydra") or (HydraConfig.get() if HydraConfig.initialized() else None)
    model, composer = cfg.get("model"), BaseModelComposer
    try:
        config_class = algorithm_class(cfg.get("algorithm"))
        found = critic_composer_type(cfg.get("critic"))
        if isinstance(model, Mapping) and isinstance(model.get(TARGET_KEY), str):
            composer = Factory(BaseModelComposer).type_from_name(model[TARGET_KEY])  # type: ignore[type-abstract]
    except ConfigError:
        return  # reported by the check of the configuration, or when the model is built
    if own_section is None or config_class is None or config_class.critic is None or found is None:
        return
    is_named = any(text.lstrip("+~").startswith(("critic", "model.critic")) for text in own_section.overrides.task)
    brings_one = isinstance(model, DictConfig) and "critic" in model and not OmegaConf.is_interpolation(model, "critic")
    is_known = issubclass(found, BaseStateCriticComposer | BaseStateActionCriticComposer)
    if is_named or brings_one or not is_known or not isinstance(cfg.critic, DictConfig):
        return
    wanted: Mapping[str, type[Any]] = {
        "state": BaseStateCriticComposer,
        "sub-step state": StepStateCriticComposer,
        "state-action": BaseStateActionCriticComposer,
    }
    kind = config_class.critic
    # networks that differ between sub-steps and agents need critics that distinguish them
    is_too_coarse = issubclass(composer, AutoModelComposer) and found is SharedStateCriticComposer
    if issubclass(found, wanted[kind]) and not is_too_coarse:
        return
    option = CRITIC_OPTIONS[kind][issubclass(composer, TemplateModelComposer)]
    with read_write(cfg), open_dict(cfg):
        cfg.critic = OmegaConf.create((files("maze.conf") / "critic" / f"{option}.yaml").read_text(encoding="utf-8"))
        if "hydra" in cfg and "critic" in cfg.hydra.runtime.choices:
            cfg.hydra.runtime.choices.critic = option


def check(cfg: DictConfig) -> None:
    """Raise a :class:`UsageError` for groups that do not fit each other, and for a missing or wrong `input_dir`."""
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
    for critic in (override for override in overrides if override.startswith("critic=")):
        check_critic(cfg, critic)
    _check_input_dir(cfg, is_training)


def check_critic(cfg: DictConfig, chosen: str) -> None:
    """Raise a :class:`UsageError` if the model has its own critic.

    :param chosen: The choice of another one.
    """
    model = cfg.get("model")
    if model is not None and not (isinstance(model, DictConfig) and OmegaConf.is_interpolation(model, "critic")):
        raise UsageError(
            f"{chosen}: the chosen model has its own critic (model.critic). Leave this critic out, or write "
            "`critic: ${critic}` in the model's configuration."
        )


def _check_input_dir(cfg: DictConfig, is_training: bool) -> None:
    input_dir = cfg.get("input_dir")
    policy = cfg.get("policy")
    if is_training:
        wanted = [str(cfg.runner.get("state_dict_dump_file", "state_dict.pt")), "latest.pt"]
    elif isinstance(policy, DictConfig) and "state_dict_file" in policy:
        wanted = [str(policy.state_dict_file)]
        if not input_dir:
            raise UsageError(
                f"input_dir: {policy._target_} needs the directory of a training run: "
                f"input_dir=outputs/<name>/<time>. {_WAY_OUT}"
            )
    else:
        return
    directory = Path(str(input_dir or ""))
    if input_dir and not directory.is_dir():
        raise UsageError(f"input_dir: {directory} is not a directory. {_WAY_OUT}")
    if input_dir and not any((directory / name).is_file() for name in wanted):
        raise UsageError(
            f"input_dir: {directory} is not the directory of a training run: there is no {' or '.join(wanted)} in it. "
            f"{_WAY_OUT}"
        )
