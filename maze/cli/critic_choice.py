"""Critics that the algorithm chooses, and those that do not suit it."""

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
    "sub-step state": BaseStateCriticComposer,  # with a single sub-step any will do
    "state-action": BaseStateActionCriticComposer,
}
_WANTED: Mapping[CriticKind, type[Any]] = {**_ACCEPTED, "sub-step state": StepStateCriticComposer}


def choose_critic(cfg: DictConfig) -> None:
    """Puts a critic of the kind that the algorithm needs, in place, where the one that is there is another by default.

    Critics that the command names, or changes, and those that a model brings, stay as they are.

    :param cfg: The composed configuration. With Hydra's own section the choice is entered there, which names the run's
        directory; without it Hydra has told its overrides (`HydraConfig`).
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
    # networks for sub-steps and agents that look different want critics that tell them apart
    tells_too_little = issubclass(composer, AutoModelComposer) and found is SharedStateCriticComposer
    if found is None or (issubclass(found, _WANTED[kind]) and not tells_too_little):
        return
    option = CRITIC_OPTIONS[kind][issubclass(composer, TemplateModelComposer)]
    with read_write(cfg), open_dict(cfg):
        cfg.critic = _shipped(option)
        if "hydra" in cfg and "critic" in cfg.hydra.runtime.choices:
            cfg.hydra.runtime.choices.critic = option


def check_critic(cfg: Any, critic_is_given: bool) -> None:
    """Compares the critic with the algorithm.

    :param cfg: The composed configuration.
    :param critic_is_given: Whether the critic was asked for, and is not only there by default.
    :raises ConfigError: They do not belong together.
    """
    model, config_class = cfg.get("model"), algorithm_class(cfg.get("algorithm"))
    if isinstance(model, BaseModelComposer) or config_class is None:
        return
    name, kind = config_class.name, config_class.critic
    if kind is None:
        if critic_is_given:
            raise ConfigError(f"critic: algorithm={name!r} has no critic. Leave the argument out.")
        return
    found = _composer_type(model.get("critic") if isinstance(model, Mapping) else None)
    if found is not None and not issubclass(found, _ACCEPTED[kind]):
        raise ConfigError(f"critic: algorithm={name!r} needs {SUITABLE_CRITICS[kind]}; got a {found.__name__}.")


def _composer_type(critic: Any) -> type[CriticComposerInterface] | None:
    """Its class, where it is one of the two kinds and can be told."""
    try:
        found = critic_composer_type(critic)
    except ConfigError:
        return None  # the model says more about it when it is built
    is_known = found is not None and issubclass(found, BaseStateCriticComposer | BaseStateActionCriticComposer)
    return found if is_known else None


def _algorithm_class(cfg: DictConfig) -> type[AlgorithmConfig] | None:
    try:
        return algorithm_class(cfg.get("algorithm"))
    except ConfigError:
        return None  # which is told when the configuration is checked


def _model_composer(model: Any) -> type[BaseModelComposer]:
    """Its class; the base class where it cannot be told."""
    factory = Factory(BaseModelComposer)  # type: ignore[type-abstract]  # the target is a concrete one
    target = model.get(TARGET_KEY) if isinstance(model, Mapping) else None
    try:
        return factory.type_from_name(target) if isinstance(target, str) else BaseModelComposer
    except ConfigError:
        return BaseModelComposer


def _shipped(option: str) -> Any:
    """The content of an option of the group `critic`."""
    from importlib.resources import files

    return OmegaConf.create((files("maze.conf") / "critic" / f"{option}.yaml").read_text(encoding="utf-8"))
