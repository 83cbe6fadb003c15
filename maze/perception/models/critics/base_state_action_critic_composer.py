"""What a state-action critic composer is."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gymnasium import spaces
from torch import nn

from maze.core.agent.torch_state_action_critic import are_all_discrete, encoded_size, q_values_key
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.perception.models.critics.base_state_critic_composer import NETWORKS
from maze.perception.models.critics.critic_composer_interface import CriticComposerInterface
from maze.perception.models.network_factory import build
from maze.perception.perception_utils import observation_spaces_to_in_shapes

if TYPE_CHECKING:
    from maze.core.agent.torch_state_action_critic import TorchStateActionCritic


class BaseStateActionCriticComposer(CriticComposerInterface):
    """Builds a state-action critic. Its networks get two arguments:

    * `obs_shapes`: shapes of the observations and, unless all action heads are `Discrete`, of the encoded actions;
    * `q_value_shapes`: shapes of what the network returns, by key: `<head>_q_values` for each head where all are
      `Discrete`, and otherwise `q_value`.

    :param observation_spaces_dict: Observation spaces by step key.
    :param action_spaces_dict: Action spaces by step key.
    """

    def __init__(
        self,
        observation_spaces_dict: dict[str | int, spaces.Dict],
        action_spaces_dict: dict[str | int, spaces.Dict],
    ) -> None:
        self._observation_spaces_dict = observation_spaces_dict
        self._action_spaces_dict = action_spaces_dict
        self._obs_shapes = observation_spaces_to_in_shapes(observation_spaces_dict)

    @property
    @abstractmethod
    @override(CriticComposerInterface)
    def critic(self) -> TorchStateActionCritic:
        """The critic (always the same object)."""

    def _build_pair(
        self, config: Any, where: str, obs_shapes: Mapping[str, Sequence[int]], action_space: spaces.Dict
    ) -> tuple[nn.Module, nn.Module | None]:
        """The two networks of a critic; `None` where a network was given, of which the critic makes the second."""
        in_shapes, q_value_shapes = q_network_shapes(obs_shapes, action_space, where)
        arguments = {"obs_shapes": in_shapes, "q_value_shapes": q_value_shapes}
        first = build(nn.Module, config, where, **copy.deepcopy(arguments))
        if first is config:
            return first, None
        return first, build(nn.Module, config, where, **arguments)


def q_network_shapes(
    obs_shapes: Mapping[str, Sequence[int]], action_space: spaces.Dict, where: str = NETWORKS
) -> tuple[dict[str, Sequence[int]], dict[str, Sequence[int]]]:
    """Shapes, without batch, of the inputs and outputs of a network of state-action values.

    :raises ConfigError: An action head is called like an observation, or cannot be encoded.
    """
    if are_all_discrete(action_space):
        return dict(obs_shapes), {q_values_key(head): tuple(size) for head, size in _discrete_sizes(action_space)}
    if clash := [head for head in action_space.spaces if head in obs_shapes]:
        raise ConfigError(
            f"{where}: {clash} are both observations and action heads, and a state-action critic sees both. Rename "
            "them in one of the conversions."
        )
    actions = {head: (encoded_size(space, head),) for head, space in action_space.spaces.items()}
    return {**obs_shapes, **actions}, {"q_value": (1,)}


def _discrete_sizes(action_space: spaces.Dict) -> list[tuple[str, tuple[int]]]:
    return [(head, (encoded_size(space, head),)) for head, space in action_space.spaces.items()]
