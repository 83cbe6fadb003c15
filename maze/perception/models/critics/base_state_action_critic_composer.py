"""Composers of state-action critics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gymnasium import spaces
from torch import nn

from maze.core.agent.torch_state_action_critic import (
    TorchSharedStateActionCritic,
    TorchStateActionCritic,
    TorchStepStateActionCritic,
    are_all_discrete,
    encoded_size,
    merged_action_space,
    q_values_key,
)
from maze.core.errors import ConfigError
from maze.core.utils.factory import CollectionOfConfigType
from maze.perception.builders.base import build, networks_by_key, only_network
from maze.perception.models.critics.base_state_critic_composer import NETWORKS
from maze.perception.models.critics.critic_composer_interface import CriticComposerInterface
from maze.perception.perception_utils import flatten_spaces, observation_spaces_to_in_shapes


class BaseStateActionCriticComposer(CriticComposerInterface):
    """Build a state-action critic; a derived class sets `_critic`. Its networks get two arguments:

    * `obs_shapes`: shapes of the observations and, unless all action heads are `Discrete`, of the encoded actions;
    * `q_value_shapes`: shapes of what the network returns, by key: `<head>_q_values` for each head where all are
      `Discrete`, and otherwise `q_value`.

    :param observation_spaces_dict: Observation spaces by step key.
    :param action_spaces_dict: Action spaces by step key.
    """

    _critic: TorchStateActionCritic

    def __init__(
        self, observation_spaces_dict: dict[str | int, spaces.Dict], action_spaces_dict: dict[str | int, spaces.Dict]
    ) -> None:
        self._action_spaces_dict = action_spaces_dict
        self._obs_shapes = observation_spaces_to_in_shapes(observation_spaces_dict)

    def _compose(
        self,
        critic_type: type[TorchStateActionCritic],
        parts: Mapping[Any, tuple[Any, str, Mapping[str, Sequence[int]], spaces.Dict]],
    ) -> None:
        """Build the critic; networks that were given have no twins, which the critic makes then.

        :param parts: Configuration, its place, shapes of observations and action heads of each pair of networks.
        :raises ConfigError: An action head is called like an observation, or cannot be encoded.
        """
        networks: dict[Any, nn.Module] = {}
        twins: dict[Any, nn.Module] = {}
        for key, (config, where, obs_shapes, action_space) in parts.items():
            sizes = {head: (encoded_size(space, head),) for head, space in action_space.spaces.items()}
            if are_all_discrete(action_space):
                of_heads = {q_values_key(head): size for head, size in sizes.items()}
                shapes: Any = {"obs_shapes": dict(obs_shapes), "q_value_shapes": of_heads}
            elif clash := [head for head in sizes if head in obs_shapes]:
                raise ConfigError(
                    f"{where}: {clash} are both observations and action heads, and a state-action critic sees both. "
                    "Rename them in one of the conversions."
                )
            else:
                shapes = {"obs_shapes": {**obs_shapes, **sizes}, "q_value_shapes": {"q_value": (1,)}}
            networks[key], twin = (build(nn.Module, config, where, **shapes) for _ in range(2))
            if twin is not networks[key]:
                twins[key] = twin
        self._critic = critic_type(
            networks=networks,
            num_policies=len(self._action_spaces_dict),
            device="cpu",
            only_discrete_spaces={key: are_all_discrete(action_space) for key, (*_, action_space) in parts.items()},
            action_spaces_dict=self._action_spaces_dict,
            twin_networks=twins if len(twins) == len(networks) else None,
        )


class SharedStateActionCriticComposer(BaseStateActionCriticComposer):
    """Build a critic whose pair of networks values the actions of all sub-steps together.

    :param observation_spaces_dict: Observation spaces by step key.
    :param action_spaces_dict: Action spaces by step key.
    :param networks: The network or its configuration, also as the only item of a list or mapping.
    """

    def __init__(
        self,
        observation_spaces_dict: dict[str | int, spaces.Dict],
        action_spaces_dict: dict[str | int, spaces.Dict],
        networks: CollectionOfConfigType,
    ) -> None:
        super().__init__(observation_spaces_dict, action_spaces_dict)
        key, config = only_network(networks, NETWORKS)
        shapes = flatten_spaces(self._obs_shapes.values())
        parts = {key: (config, f"{NETWORKS}[0]", shapes, merged_action_space(action_spaces_dict))}
        self._compose(TorchSharedStateActionCritic, parts)


class StepStateActionCriticComposer(BaseStateActionCriticComposer):
    """Build a critic with a pair of networks for each sub-step.

    :param observation_spaces_dict: Observation spaces by step key.
    :param action_spaces_dict: Action spaces by step key.
    :param networks: Networks, or configurations of them: a mapping from step keys, or a list in their order.
    """

    def __init__(
        self,
        observation_spaces_dict: dict[str | int, spaces.Dict],
        action_spaces_dict: dict[str | int, spaces.Dict],
        networks: CollectionOfConfigType,
    ) -> None:
        super().__init__(observation_spaces_dict, action_spaces_dict)
        configs = networks_by_key(networks, action_spaces_dict, NETWORKS)
        parts = {key: (*given, self._obs_shapes[key], action_spaces_dict[key]) for key, given in configs.items()}
        self._compose(TorchStepStateActionCritic, parts)
