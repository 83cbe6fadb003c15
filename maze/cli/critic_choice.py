"""Choice of the critic that an algorithm needs, and check of a given critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from maze.core.errors import ConfigError
from maze.core.utils.factory import TARGET_KEY, Factory
from maze.perception.models.auto_model_composer import AutoModelComposer
from maze.perception.models.critics import SharedStateCriticComposer, StepStateCriticComposer
from maze.perception.models.critics.base_state_action_critic_composer import BaseStateActionCriticComposer
from maze.perception.models.critics.base_state_critic_composer import BaseStateCriticComposer
from maze.perception.models.critics.critic_composer_interface import CriticComposerInterface
from maze.perception.models.model_composer import (
    CRITIC_OPTIONS,
    SUITABLE_CRITICS,
    BaseModelComposer,
    CriticKind,
    critic_composer_type,
)
from maze.perception.models.template_model_composer import TemplateModelComposer
from maze.train.trainers.common.config_classes import AlgorithmConfig, algorithm_class

_ACCEPTED: Mapping[CriticKind, type[Any]] = {
    "state": BaseStateCriticComposer,
    "sub-step state": BaseStateCriticComposer,  # with a single sub-step, any state critic fits
    "state-action": BaseStateActionCriticComposer,
}
_WANTED: Mapping[CriticKind, type[Any]] = {**_ACCEPTED, "sub-step state": StepStateCriticComposer}


def choose_critic(cfg: DictConfig) -> None:
    """Replace, in place, a default critic of another kind than the algorithm needs.

    Critics that the command names or changes, and the critic of a model, are kept.

    :param cfg: The composed configuration. If it has Hydra's own section, the choice is entered there, since the run's
        directory is named after it; otherwise the overrides are those of `HydraConfig`.
    """
    from hydra.core.hydra_config import HydraConfig

    own_section = cfg.get("hydra") or (HydraConfig.get() if HydraConfig.initialized() else None)
    config_class = _algorithm_class(cfg)
    if own_section is None or config_class is None or config_class.critic is None:
        return
    is_named = any(text.lstrip("+~").startswith(("critic", "model.critic")) for text in own_section.overrides.task)
    model = cfg.get("model")
    brings_one = isinstance(model, DictConfig) and "critic" in model and not OmegaConf.is_interpolation(model, "critic")
    if is_named or brings_one or not isinstance(cfg.get("critic"), DictConfig):
        return
    found, composer, kind = _composer_type(cfg.critic), _model_composer(model), config_class.critic
    # networks that differ between sub-steps and agents need critics that distinguish them
    is_too_coarse = issubclass(composer, AutoModelComposer) and found is SharedStateCriticComposer
    if found is None or (issubclass(found, _WANTED[kind]) and not is_too_coarse):
        return
    option = CRITIC_OPTIONS[kind][issubclass(composer, TemplateModelComposer)]
    with read_write(cfg), open_dict(cfg):
        cfg.critic = _shipped(option)
        if "hydra" in cfg and "critic" in cfg.hydra.runtime.choices:
            cfg.hydra.runtime.choices.critic = option


def check_critic(cfg: Any, critic_is_given: bool) -> None:
    """Check that the critic fits the algorithm.

    :param cfg: The composed configuration.
    :param critic_is_given: Whether the user gave the critic, instead of using the default.
    :raises ConfigError: They do not fit.
    """
    model, config_class = cfg.get("model"), algorithm_class(cfg.get("algorithm"))
    if isinstance(model, BaseModelComposer) or config_class is None:
        return
    name, kind = config_class.name, config_class.critic
    if kind is None:
        if critic_is_given:
            raise ConfigError(f"critic: algorithm={name!r} has no critic. Remove the argument.")
        return
    found = _composer_type(model.get("critic") if isinstance(model, Mapping) else None)
    if found is not None and not issubclass(found, _ACCEPTED[kind]):
        raise ConfigError(f"critic: algorithm={name!r} needs {SUITABLE_CRITICS[kind]}; found a {found.__name__}.")


def _composer_type(critic: Any) -> type[CriticComposerInterface] | None:
    """Return its class if it is known and one of the two kinds."""
    try:
        found = critic_composer_type(critic)
    except ConfigError:
        return None  # building the model raises a detailed error
    is_known = found is not None and issubclass(found, BaseStateCriticComposer | BaseStateActionCriticComposer)
    return found if is_known else None


def _algorithm_class(cfg: DictConfig) -> type[AlgorithmConfig] | None:
    try:
        return algorithm_class(cfg.get("algorithm"))
    except ConfigError:
        return None  # reported by the check of the configuration


def _model_composer(model: Any) -> type[BaseModelComposer]:
    """Return its class; the base class if it is unknown."""
    factory = Factory(BaseModelComposer)  # type: ignore[type-abstract]  # the target is a concrete one
    target = model.get(TARGET_KEY) if isinstance(model, Mapping) else None
    try:
        return factory.type_from_name(target) if isinstance(target, str) else BaseModelComposer
    except ConfigError:
        return BaseModelComposer


def _shipped(option: str) -> Any:
    """Return the content of an option of the group `critic`."""
    from importlib.resources import files

    return OmegaConf.create((files("maze.conf") / "critic" / f"{option}.yaml").read_text(encoding="utf-8"))
