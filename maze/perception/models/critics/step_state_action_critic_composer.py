"""Composes step state-action critics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gymnasium import spaces

from maze.core.agent.torch_state_action_critic import TorchStepStateActionCritic, are_all_discrete
from maze.core.annotations import override
from maze.perception.models.critics.base_state_action_critic_composer import BaseStateActionCriticComposer
from maze.perception.models.critics.base_state_critic_composer import NETWORKS
from maze.perception.models.network_factory import networks_by_key

if TYPE_CHECKING:
    from maze.core.utils.factory import CollectionOfConfigType


class StepStateActionCriticComposer(BaseStateActionCriticComposer):
    """Builds a critic with a pair of networks for each sub-step.

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
        pairs = {
            key: self._build_pair(
                config,
                f"{NETWORKS}[{index if isinstance(key, int) else key}]",
                self._obs_shapes[key],
                action_spaces_dict[key],
            )
            for index, (key, config) in enumerate(networks_by_key(networks, action_spaces_dict, NETWORKS).items())
        }
        twins = {key: second for key, (_, second) in pairs.items() if second is not None}
        self._critic = TorchStepStateActionCritic(
            networks={key: first for key, (first, _) in pairs.items()},
            num_policies=len(action_spaces_dict),
            device="cpu",
            only_discrete_spaces={key: are_all_discrete(space) for key, space in action_spaces_dict.items()},
            action_spaces_dict=action_spaces_dict,
            twin_networks=twins if len(twins) == len(pairs) else None,
        )

    @property
    @override(BaseStateActionCriticComposer)
    def critic(self) -> TorchStepStateActionCritic:
        return self._critic
