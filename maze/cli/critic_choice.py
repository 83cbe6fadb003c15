"""Choice of the critic that an algorithm needs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from maze.core.errors import ConfigError
from maze.core.utils.factory import TARGET_KEY, Factory
from maze.perception.models.auto_model_composer import AutoModelComposer
from maze.perception.models.critics import SharedStateCriticComposer, StepStateCriticComposer
from maze.perception.models.critics.base_state_action_critic_composer import BaseStateActionCriticComposer
from maze.perception.models.critics.base_state_critic_composer import BaseStateCriticComposer
from maze.perception.models.critics.critic_composer_interface import CriticComposerInterface
from maze.perception.models.model_composer import CRITIC_OPTIONS, BaseModelComposer, CriticKind, critic_composer_type
from maze.perception.models.template_model_composer import TemplateModelComposer
from maze.train.trainers.common.config_classes import algorithm_class

_WANTED: Mapping[CriticKind, type[Any]] = {
    "state": BaseStateCriticComposer,
    "sub-step state": StepStateCriticComposer,
    "state-action": BaseStateActionCriticComposer,
}


def choose_critic(cfg: DictConfig) -> None:
    """Replace, in place, a default critic of another kind than the algorithm needs.

    Critics that the command names or changes, and the critic of a model, are kept.

    :param cfg: The composed configuration. If it has Hydra's own section, the choice is entered there, since the run's
        directory is named after it; otherwise the overrides are those of `HydraConfig`.
    """
    from hydra.core.hydra_config import HydraConfig

    own_section = cfg.get("hydra") or (HydraConfig.get() if HydraConfig.initialized() else None)
    try:
        config_class = algorithm_class(cfg.get("algorithm"))
    except ConfigError:
        return  # reported by the check of the configuration
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
        cfg.critic = OmegaConf.create((files("maze.conf") / "critic" / f"{option}.yaml").read_text(encoding="utf-8"))
        if "hydra" in cfg and "critic" in cfg.hydra.runtime.choices:
            cfg.hydra.runtime.choices.critic = option


def _composer_type(critic: Any) -> type[CriticComposerInterface] | None:
    """Return its class if it is known and one of the two kinds."""
    try:
        found = critic_composer_type(critic)
    except ConfigError:
        return None  # building the model raises a detailed error
    is_known = found is not None and issubclass(found, BaseStateCriticComposer | BaseStateActionCriticComposer)
    return found if is_known else None


def _model_composer(model: Any) -> type[BaseModelComposer]:
    """Return its class; the base class if it is unknown."""
    factory = Factory(BaseModelComposer)  # type: ignore[type-abstract]  # the target is a concrete one
    target = model.get(TARGET_KEY) if isinstance(model, Mapping) else None
    try:
        return factory.type_from_name(target) if isinstance(target, str) else BaseModelComposer
    except ConfigError:
        return BaseModelComposer
