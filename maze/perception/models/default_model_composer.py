"""Composer of flatten-and-concatenate models for flat vectors, and of derived models for other spaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gymnasium import spaces

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.env.structured_env import StepKeyType
from maze.core.utils.factory import ConfigType, plain_container
from maze.perception.models import auto_model_composer
from maze.perception.models.custom_model_composer import CustomModelComposer
from maze.perception.models.model_composer import BaseModelComposer, Critic
from maze.perception.models.template_model_composer import TemplateModelComposer


class FlattenConcatModelComposer(BaseModelComposer):
    """Build the configured networks, if flattening and concatenating suits the spaces.

    Otherwise, if the networks are those of `flatten_concat`, an
    :class:`~maze.perception.models.auto_model_composer.AutoModelComposer` replaces them, with their widths and
    activation, and with a critic for each sub-step: if observations are not flat vectors, if one of them is an action
    mask, or if sub-steps have no network. :meth:`save_models` reports it.

    :param action_spaces_dict: Action spaces by step key.
    :param observation_spaces_dict: Observation spaces by step key.
    :param agent_counts_dict: Number of agents by step key; -1: it changes.
    :param distribution_mapper_config: Distributions that differ from the defaults.
    :param policy: A policy composer, or its configuration; `None`: there is no policy.
    :param critic: A critic composer, or its configuration; `None`: there is no critic.
    """

    def __init__(
        self,
        action_spaces_dict: dict[StepKeyType, spaces.Dict],
        observation_spaces_dict: dict[StepKeyType, spaces.Dict],
        agent_counts_dict: dict[StepKeyType, int],
        distribution_mapper_config: ConfigType = None,
        policy: ConfigType = None,
        critic: ConfigType = None,
    ) -> None:
        super().__init__(action_spaces_dict, observation_spaces_dict, agent_counts_dict, distribution_mapper_config)
        given = (action_spaces_dict, observation_spaces_dict, agent_counts_dict, distribution_mapper_config)
        networks = auto_model_composer.flat_networks(policy)
        self.handed_over = _more_than_flat(action_spaces_dict, observation_spaces_dict, networks) if networks else ""
        """Why the model is derived from the spaces; empty: it is not."""
        self._composer: BaseModelComposer
        if self.handed_over:
            critic_by_step = auto_model_composer.as_step_critic(critic)
            if len(action_spaces_dict) > 1 and critic_by_step != plain_container(critic):
                self.handed_over += "; critics value each sub-step on its own (model=auto keeps a shared critic)"
            settings = {key: networks[0][key] for key in ("hidden_units", "non_lin") if networks[0].get(key)}
            settings["shared_embedding"] = "head_units" in networks[0]
            self._composer = auto_model_composer.AutoModelComposer(
                *given, auto_model_composer.without_flat_networks(policy), critic_by_step, **settings
            )
        else:
            self._composer = CustomModelComposer(*given, policy, critic)

    @classmethod
    @override(BaseModelComposer)
    def check_model_config(cls, model_config: ConfigType) -> None:
        CustomModelComposer.check_model_config(model_config)

    @property
    @override(BaseModelComposer)
    def policy(self) -> TorchPolicy | None:
        return self._composer.policy

    @property
    @override(BaseModelComposer)
    def critic(self) -> Critic | None:
        return self._composer.critic

    @override(BaseModelComposer)
    def save_models(self, save_path: str | Path = ".") -> None:
        if self.handed_over:
            print(f"model=flatten_concat hands over to model=auto: {self.handed_over}.", flush=True)
        self._composer.save_models(save_path)


def _more_than_flat(
    action_spaces_dict: Mapping[StepKeyType, spaces.Dict],
    observation_spaces_dict: Mapping[StepKeyType, spaces.Dict],
    networks: Sequence[Any],
) -> str:
    """Describe why flattening and concatenating does not suit the spaces; empty: it does."""
    for step in observation_spaces_dict.values():
        for key, space in step.spaces.items():
            if not auto_model_composer.is_flat(space):
                shape = f" of the shape {space.shape}" if isinstance(space, spaces.Box) else ""
                return f"`{key}` is not a flat vector but a {type(space).__name__}{shape}"
    if masks := auto_model_composer.recognised_masks(action_spaces_dict, observation_spaces_dict):
        head, mask = next(iter(masks.items()))
        return f"`{mask}` masks the action `{head}`"
    if len(networks) == 1 < len(action_spaces_dict):
        return f"there are {len(action_spaces_dict)} sub-steps, and one network is configured"
    return ""


DefaultModelComposer = TemplateModelComposer
