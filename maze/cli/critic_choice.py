"""Choice of the critic that an algorithm needs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from maze.core.errors import ConfigError
from maze.core.utils.factory import TARGET_KEY, Factory
from maze.perception.models.auto_model_composer import AutoModelComposer
from maze.perception.models.critics import SharedStateCriticComposer, StepStateCriticComposer
from maze.perception.models.critics.base_state_action_critic_composer import BaseStateActionCriticComposer
from maze.perception.models.critics.base_state_critic_composer import BaseStateCriticComposer
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
    kind = config_class.critic
    # networks that differ between sub-steps and agents need critics that distinguish them
    is_too_coarse = issubclass(composer, AutoModelComposer) and found is SharedStateCriticComposer
    if issubclass(found, _WANTED[kind]) and not is_too_coarse:
        return
    option = CRITIC_OPTIONS[kind][issubclass(composer, TemplateModelComposer)]
    with read_write(cfg), open_dict(cfg):
        cfg.critic = OmegaConf.create((files("maze.conf") / "critic" / f"{option}.yaml").read_text(encoding="utf-8"))
        if "hydra" in cfg and "critic" in cfg.hydra.runtime.choices:
            cfg.hydra.runtime.choices.critic = option
