"""Composes shared state-action critics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gymnasium import spaces

from maze.core.agent.torch_state_action_critic import (
    TorchSharedStateActionCritic,
    are_all_discrete,
    merged_action_space,
)
from maze.core.annotations import override
from maze.perception.models.critics.base_state_action_critic_composer import BaseStateActionCriticComposer
from maze.perception.models.critics.base_state_critic_composer import NETWORKS
from maze.perception.models.network_factory import only_network

if TYPE_CHECKING:
    from maze.core.utils.factory import CollectionOfConfigType


class SharedStateActionCriticComposer(BaseStateActionCriticComposer):
    """Builds a critic whose one pair of networks judges the actions of all sub-steps together.

    :param observation_spaces_dict: Observation spaces by step key.
    :param action_spaces_dict: Action spaces by step key.
    :param networks: The one network, or its configuration; also as the only item of a list or mapping.
    """

    def __init__(
        self,
        observation_spaces_dict: dict[str | int, spaces.Dict],
        action_spaces_dict: dict[str | int, spaces.Dict],
        networks: CollectionOfConfigType,
    ) -> None:
        super().__init__(observation_spaces_dict, action_spaces_dict)
        key, config = only_network(networks, NETWORKS)
        action_space = merged_action_space(action_spaces_dict)
        first, second = self._build_pair(config, f"{NETWORKS}[0]", self._merged_shapes(), action_space)
        self._critic = TorchSharedStateActionCritic(
            networks={key: first},
            num_policies=len(action_spaces_dict),
            device="cpu",
            only_discrete_spaces={key: are_all_discrete(action_space)},
            action_spaces_dict=action_spaces_dict,
            twin_networks=None if second is None else {key: second},
        )

    @property
    @override(BaseStateActionCriticComposer)
    def critic(self) -> TorchSharedStateActionCritic:
        return self._critic

    def _merged_shapes(self) -> dict[str, Sequence[int]]:
        merged: dict[str, Sequence[int]] = {}
        for shapes in self._obs_shapes.values():
            for key, shape in shapes.items():
                merged.setdefault(key, shape)
        return merged
