"""State-action critics made of torch networks.

Each critic is a pair of networks with target networks that follow them slowly: the smaller of the two target values
counts in targets, which keeps them from growing by their own errors (Fujimoto et al. 2018).

A network maps a dictionary to a dictionary:

* all action heads of the sub-step are `Discrete`: observations to `<head>_q_values` `[..., n_actions]` for each
  head, the values of all actions at once;
* otherwise: observations and encoded actions, under their own keys, to
  `q_value` `[..., 1]`, the value of the joint action.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import nn
from torch.nn import functional

from maze.core.agent import torch_model
from maze.core.agent.state_action_critic import StateActionCritic
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.perception.blocks.recurrent.recurrent_cell import recurrent_cells
from maze.perception.perception_utils import flatten_spaces

TARGET_GROUP = "target_critics"

TensorDict = dict[str, torch.Tensor]
StepTensors = dict[str | int, TensorDict]
QValues = dict[str | int, list[torch.Tensor | TensorDict]]
NextQValues = dict[str | int, torch.Tensor | TensorDict]


class TorchStateActionCritic(torch_model.NetworksModel, StateActionCritic):
    """Base of the state-action critics.

    :param networks: One network for each step key (a shared critic has one).
    :param num_policies: Number of policies that act, i.e. of sub-steps.
    :param device: Device of the networks.
    :param only_discrete_spaces: By the networks' keys: whether all action heads are `Discrete`.
    :param action_spaces_dict: Action spaces by step key.
    :param twin_networks: The second network of each pair; by default copies of `networks` with new weights.
    :raises ConfigError: A network is recurrent.
    """

    state_group = "critics"
    networks: dict[Any, nn.ModuleList]

    def __init__(
        self,
        networks: Mapping[str | int, nn.Module],
        num_policies: int,
        device: str,
        only_discrete_spaces: dict[str | int, bool],
        action_spaces_dict: dict[str | int, spaces.Dict],
        twin_networks: Mapping[str | int, nn.Module] | None = None,
    ) -> None:
        first = torch_model.check_networks(networks, "critic.networks")
        if twin_networks is None:
            second = {key: _with_new_weights(copy.deepcopy(network)) for key, network in first.items()}
        else:
            second = torch_model.check_networks(twin_networks, "critic.twin_networks")
        if any(recurrent_cells(network) for network in (*first.values(), *second.values())):
            raise ConfigError(
                "critic.networks: expected networks without hidden states in a state-action critic, found a "
                "RecurrentCellBlock. Use PPO or A2C, or `model.recurrence=true` with stacked observations."
            )
        self.num_policies = num_policies
        self.only_discrete_spaces = dict(only_discrete_spaces)
        self.action_spaces_dict = action_spaces_dict
        self.target_networks: dict[Any, nn.ModuleList] = {}
        pairs = {key: nn.ModuleList([first[key], second[key]]) for key in first}
        super().__init__(pairs, device, "critic.networks")
        # Action heads that each critic judges.
        self._heads_of: dict[Any, spaces.Dict] = action_spaces_dict
        self.target_networks = {key: copy.deepcopy(pair).eval() for key, pair in self.networks.items()}
        for pair in self.target_networks.values():
            pair.requires_grad_(False)

    # -- values of one critic -----------------------------------------------------------------------------------------

    def compute_state_action_value_step(
        self, observation: TensorDict, action: TensorDict, critic_id: str | int | tuple[Any, ...]
    ) -> list[torch.Tensor]:
        """Return values of joint actions by both networks of a critic.

        :param observation: Observations `[..., *shape]`.
        :param action: Actions `[..., *shape]` by head; gradients pass through those of `Box` heads.
        :param critic_id: Key of the critic.
        :return: Two tensors `[...]`.
        """
        return self._joint_values(self._network(critic_id), observation, action, critic_id)

    def compute_state_action_values_step(
        self, observation: TensorDict, critic_id: str | int | tuple[Any, ...]
    ) -> list[TensorDict]:
        """Return values of all actions of all (discrete) heads by both networks of a critic.

        :param observation: Observations `[..., *shape]` by key.
        :param critic_id: Key of the critic.
        :return: Two dictionaries from action heads to tensors `[..., n_actions]`.
        """
        return self._values_of_all_actions(self._network(critic_id), observation, critic_id)

    @override(StateActionCritic)
    def predict_q_values(self, observations: StepTensors, actions: StepTensors, gather_output: bool) -> QValues:
        taken = self._by_critic(actions)
        found: QValues = {}
        for key, observation in self._by_critic(observations).items():
            if not self.only_discrete_spaces[key]:
                found[key] = [*self.compute_state_action_value_step(observation, taken[key], key)]
                continue
            found[key] = [*self.compute_state_action_values_step(observation, key)]
            if gather_output:
                chosen = {head: action.long().unsqueeze(-1) for head, action in taken[key].items()}
                found[key] = [
                    {head: q.gather(-1, chosen[head]).squeeze(-1) for head, q in values.items()}  # type: ignore[union-attr]
                    for values in found[key]
                ]
        return found

    @torch.no_grad()
    def predict_next_q_values(
        self,
        next_observations: StepTensors,
        next_actions: StepTensors,
        next_actions_logits: StepTensors,
        next_actions_log_probs: StepTensors,
        alpha: dict[str | int, torch.Tensor],
    ) -> NextQValues:
        """Return soft values of the next states by the target networks, without gradients.

        Where all heads are discrete it is the expectation of `min(Q1, Q2) - alpha * log p` over the policy, for each
        head (Christodoulou 2019, eq. 10), and otherwise the sampled joint action's. The logits are the masked ones that
        the action was drawn from: an action that is not allowed has probability zero and no part in the expectation.
        Whether a value counts at all (it does unless the episode terminated) is up to the trainer.

        :param next_observations: By step key.
        :param next_actions: Drawn by the policy, by step key and action head.
        :param next_actions_logits: Their logits, by step key and action head.
        :param next_actions_log_probs: Their log-probabilities, by step key and action head.
        :param alpha: Entropy coefficient by step key.
        :return: For each critic a tensor `[...]`, or tensors by action head where all heads are discrete.
        """
        values: NextQValues = {}
        logits, actions = self._by_critic(next_actions_logits), self._by_critic(next_actions)
        for key, observation in self._by_critic(next_observations).items():
            steps, pair = self._steps(key), self.target_networks[key]
            if self.only_discrete_spaces[key]:
                first, second = self._values_of_all_actions(pair, observation, key)
                alphas = {head: alpha[step] for step in steps for head in self.action_spaces_dict[step].spaces}
                values[key] = {
                    head: expected_soft_value(torch.minimum(q, second[head]), logits[key][head], alphas[head])
                    for head, q in first.items()
                }
            else:
                joint, other = self._joint_values(pair, observation, actions[key], key)
                cost = _sum(alpha[step] * _sum(next_actions_log_probs[step].values()) for step in steps)
                values[key] = torch.minimum(joint, other) - cost
        return values

    @property
    def num_critics(self) -> int:
        """Number of critics; each one is a pair of networks."""
        return len(self.networks)

    # -- learning -----------------------------------------------------------------------------------------------------

    def per_critic_parameters(self) -> list[list[torch.Tensor]]:
        """Return parameters of each critic (both of its networks), each one once.

        :return: Each with the shape that it has in its network, `[...]`.
        """
        return [torch_model.unique_parameters([pair]) for pair in self.networks.values()]

    def update_target_weights(self, tau: float) -> None:
        """Move the target networks towards the networks; see :class:`~maze.core.agent.torch_model.TargetNetworks`.

        :param tau: 0: they stay, 1: they become the networks.
        """
        self.followers().update(tau)

    def followers(self) -> torch_model.TargetNetworks:
        """Return the target networks, for callers that update them often."""
        return torch_model.TargetNetworks((self.target_networks[key] for key in self.networks), self.networks.values())

    def re_init_networks(self) -> None:
        """Draw new weights for all networks; the targets equal them afterwards."""
        for pair in self.networks.values():
            _with_new_weights(pair)
        self.update_target_weights(1.0)

    # -- networks -----------------------------------------------------------------------------------------------------

    @override(torch_model.NetworksModel)
    def _move_networks(self) -> None:
        super()._move_networks()
        for pair in self.target_networks.values():
            pair.to(self._device)

    @override(torch_model.NetworksModel)
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), TARGET_GROUP: torch_model.network_weights(self.target_networks)}

    @override(torch_model.NetworksModel)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        torch_model.check_network_weights(self.target_networks, state_dict, TARGET_GROUP)
        super().load_state_dict(state_dict)
        torch_model.load_network_weights(self.target_networks, state_dict, TARGET_GROUP)

    # -- computation --------------------------------------------------------------------------------------------------

    def _by_critic(self, by_step: StepTensors) -> StepTensors:
        """Return tensors of each critic, from those of each sub-step."""
        return by_step

    def _steps(self, key: Any) -> Sequence[Any]:
        """Return the sub-steps whose actions a critic evaluates."""
        return [key]

    def _joint_values(
        self, pair: nn.ModuleList, observation: TensorDict, action: TensorDict, key: Any
    ) -> list[torch.Tensor]:
        inputs = torch_model.as_float_tensors(observation, self._device)
        dtype = torch.get_default_dtype()
        batch_shape: torch.Size | None = None
        for head, space in self._heads_of[key].spaces.items():
            if head not in action:
                raise ConfigError(f"critic {key!r}: action head `{head}` is missing; found {sorted(action)}.")
            tensor = torch.as_tensor(action[head]).to(self._device)
            batch_shape = tensor.shape[: tensor.dim() - len(space.shape or ())]
            inputs[head] = encode_action(space, tensor, dtype)
        assert batch_shape is not None, "an action space with heads"
        return [self._one_value(network(inputs), "q_value", batch_shape, key) for network in pair]

    def _values_of_all_actions(self, pair: nn.ModuleList, observation: TensorDict, key: Any) -> list[TensorDict]:
        inputs = torch_model.as_float_tensors(observation, self._device)
        found: list[TensorDict] = []
        for network in pair:
            outputs = network(inputs)
            values: TensorDict = {}
            for head, space in self._heads_of[key].spaces.items():
                assert isinstance(space, spaces.Discrete)
                value = outputs.get(q_values_key(head))
                if value is None or value.shape[-1] != space.n:
                    shapes = {name: tuple(tensor.shape) for name, tensor in outputs.items()}
                    raise ConfigError(
                        f"critic.networks[{key!r}] returned {shapes}, expected `{q_values_key(head)}` that ends with "
                        f"{space.n}, the number of actions."
                    )
                values[head] = value
            found.append(values)
        return found


class TorchSharedStateActionCritic(TorchStateActionCritic):
    """One critic for all sub-steps: it judges all actions of an environment step together.

    Observations that several sub-steps have under one key are taken from the first of them; action heads need different
    names in different sub-steps.

    :param arguments: Arguments of :class:`TorchStateActionCritic`, whose `networks` has one entry of any key.
    :param named: The same, by name.
    :raises ConfigError: There is not one network, or two sub-steps have an action head of the same name.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if len(self.networks) != 1:
            raise ConfigError(f"critic.networks: a shared critic has one network, found {list(self.networks)}.")
        self._key = next(iter(self.networks))
        self._heads_of = {self._key: merged_action_space(self.action_spaces_dict)}

    @override(TorchStateActionCritic)
    def _by_critic(self, by_step: StepTensors) -> StepTensors:
        return {self._key: flatten_spaces(by_step.values())}

    @override(TorchStateActionCritic)
    def _steps(self, key: Any) -> Sequence[Any]:
        return list(self.action_spaces_dict)


class TorchStepStateActionCritic(TorchStateActionCritic):
    """A critic of its own for each sub-step."""


def _with_new_weights(network: nn.Module) -> nn.Module:
    """Reset all modules that can be reset, the innermost first, so that a network's own method has the last word."""

    def reset(module: nn.Module) -> None:
        reset_parameters = getattr(module, "reset_parameters", None)
        if callable(reset_parameters):
            reset_parameters()

    return network.apply(reset)


def _sum(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, tensors)


def are_all_discrete(action_space: spaces.Dict) -> bool:
    """Return whether all heads are `Discrete`, so that a network can return the values of all actions at once."""
    return all(isinstance(space, spaces.Discrete) for space in action_space.spaces.values())


def encoded_size(space: spaces.Space[Any], head: str) -> int:
    """Return the number of features that :func:`encode_action` gives for one action head.

    :param space: Space of the head.
    :param head: Name of the head, for the message.
    :raises ConfigError: The space has no encoding.
    """
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum())
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return max(1, torch.Size(space.shape or ()).numel())
    raise ConfigError(f"Action head `{head}`: state-action critics cannot process {space}.")


def encode_action(space: spaces.Space[Any], action: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return choices as one-hot vectors, numbers as they are (with their gradients).

    >>> encode_action(spaces.MultiDiscrete([2, 3]), torch.tensor([1, 0]), torch.float32)
    tensor([0., 1., 1., 0., 0.])

    :param space: Space of one action head.
    :param action: `[..., *space.shape]` with any leading batch dimensions.
    :param dtype: Floating type of the features.
    :return: `[..., encoded_size(space)]`
    """
    n_dims = len(space.shape or ())
    if isinstance(space, spaces.Discrete):
        return functional.one_hot(action.long(), int(space.n)).to(dtype)
    flat = action.flatten(action.dim() - n_dims) if n_dims else action.unsqueeze(-1)
    if isinstance(space, spaces.MultiDiscrete):
        sizes = [int(size) for size in space.nvec.flatten()]
        parts = [functional.one_hot(flat[..., index].long(), size) for index, size in enumerate(sizes)]
        return torch.cat(parts, dim=-1).to(dtype)
    return flat.to(dtype)


def q_values_key(head: str) -> str:
    """Return the key under which a network returns the values of all actions of a discrete head."""
    return f"{head}_q_values"


def merged_action_space(action_spaces_dict: Mapping[Any, spaces.Dict]) -> spaces.Dict:
    """Return the action heads of all sub-steps.

    :raises ConfigError: Two sub-steps have a head of the same name, of which a shared critic would observe only one.
    """
    heads: dict[str, spaces.Space[Any]] = {}
    for step_key, space in action_spaces_dict.items():
        for head, subspace in space.spaces.items():
            if head in heads:
                raise ConfigError(
                    f"model.critic: a shared state-action critic judges the actions of all sub-steps together, but "
                    f"`{head}` of sub-step {step_key!r} is an action head of an earlier sub-step as well. Rename it in "
                    "the action conversion, or use maze.perception.models.critics.StateActionCriticComposer."
                )
            heads[head] = subspace
    return spaces.Dict(heads)


def masked_log_probs(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities, 0 where an action is masked so that `p * log p` is 0 as well, and probabilities.

    :param logits: `[..., n_actions]`; masked actions have the dtype's minimum, or minus infinity.
    """
    masked = logits <= torch.finfo(logits.dtype).min
    log_probs = torch.log_softmax(logits, dim=-1)
    return log_probs.masked_fill(masked, 0.0), log_probs.exp().masked_fill(masked, 0.0)


def expected_soft_value(q_values: torch.Tensor, logits: torch.Tensor, alpha: torch.Tensor | float) -> torch.Tensor:
    """Return the expectation of `Q - alpha * log p` over a categorical policy.

    :param q_values: `[..., n_actions]`
    :param logits: `[..., n_actions]`; masked actions have the dtype's minimum, or minus infinity.
    :param alpha: Entropy coefficient.
    """
    log_probs, probs = masked_log_probs(logits)
    return (probs * (q_values - alpha * log_probs)).sum(-1)
