"""State critics made of torch networks.

Values have the shape of the batch; networks may return them as `[...]` or `[..., 1]` under the key `value`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from torch import nn

from maze.core.agent.returns import gae, next_values_from
from maze.core.agent.state_critic import StateCritic
from maze.core.agent.state_critic_input_output import StateCriticInput, StateCriticOutput, StateCriticStepOutput
from maze.core.agent.torch_model import NetworksModel, as_float_tensors
from maze.core.annotations import override
from maze.core.env.observation_conversion import ObservationType
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import ConfigError
from maze.perception.blocks.recurrent.recurrent_cell import Run
from maze.perception.perception_utils import flatten_spaces, stack_and_flatten_spaces

TensorDict = dict[str, torch.Tensor]


class TorchStateCritic(NetworksModel, StateCritic):
    """Base of the state critics.

    :param networks: Value networks by step key (a shared critic has one).
    :param obs_spaces_dict: Observation spaces of all sub-steps.
    :param device: Device of the networks.
    """

    state_group = "critics"
    networks: dict[Any, nn.Module]
    predicts_substeps: ClassVar[bool] = False
    """Whether each output predicts the rewards of its own sub-step; otherwise all predict those of the whole step."""
    n_quantiles: int = 0
    """Number of quantiles of each value, which are its last dimension; 0: values are scalars."""

    def __init__(
        self, networks: Mapping[str | int, nn.Module], obs_spaces_dict: dict[StepKeyType, spaces.Dict], device: str
    ) -> None:
        super().__init__(networks, device, "critic.networks")
        self.obs_spaces_dict = obs_spaces_dict
        self._shapes = {
            key: tuple(subspace.shape or ())
            for space in obs_spaces_dict.values()
            for key, subspace in space.spaces.items()
        }

    @property
    def num_critics(self) -> int:
        """Maximum number of outputs of :meth:`predict_values`: 1 for a shared critic."""
        return len(self.networks)

    @override(StateCritic)
    def predict_value(self, observation: ObservationType, critic_id: int | str) -> Any:
        """Return the value of the observations of one sub-step.

        :param observation: Observations `[..., *shape]` by key.
        :param critic_id: Key of the network.
        :return: The network's outputs, `value` among them; a shared or delta critic returns the values themselves.
        """
        return {"value": self._value(critic_id, observation)}

    @torch.no_grad()
    def bootstrap_values(
        self, observation: ObservationType, actor: ActorID, known: Any = (), position: int = 0, run: Run | None = None
    ) -> torch.Tensor:
        """Return values, without gradients, of observations after which no complete environment step is recorded.

        :param observation: Observations `[..., *shape]` of the actor that would act next.
        :param actor: The next actor.
        :param known: Latest known observations of all sub-steps, in order. A critic of all sub-steps uses those of the
            sub-steps that have not been played yet.
        :param position: The sub-step (counted from 0) that the observation belongs to.
        :param run: Source of the hidden states; required by recurrent critics.
        :return: Values in the shape of the batch.
        """
        return self._value(actor[0], observation, run)

    def compute_structured_return(
        self,
        gamma: float,
        gae_lambda: float,
        rewards: list[torch.Tensor],
        values: list[torch.Tensor],
        dones: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Return targets of the values of a sequence of environment steps with the same sub-steps.

        :param gamma: Discount for each environment step.
        :param gae_lambda: 0: one-step targets, 1: discounted returns.
        :param rewards: For each sub-step `[n_steps, n_envs]`.
        :param values: For each of :meth:`predict_values`' outputs, without gradients, `[n_steps, n_envs]`.
        :param dones: The episode terminated in this environment step, `[n_steps, n_envs]`.
            The last step, whose successor is not known, bootstraps from its own value.
        :return: Targets for each sub-step.
        """
        streams = rewards if self.predicts_substeps else [sum(rewards[1:], rewards[0])]
        targets = [
            self.compute_return(gamma, gae_lambda, reward, values[index], dones) for index, reward in enumerate(streams)
        ]
        return targets * (len(rewards) // len(streams))

    def compute_return(
        self,
        gamma: float,
        gae_lambda: float,
        rewards: torch.Tensor,
        values: torch.Tensor,
        dones: torch.Tensor,
        deltas: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return targets of one output: generalised advantages plus values.

        :param gamma: Discount for each environment step.
        :param gae_lambda: 0: one-step targets, 1: discounted returns.
        :param rewards: `[n_steps, n_envs]`.
        :param values: `[n_steps, n_envs]`. The last step bootstraps from its own value.
        :param dones: The episode terminated in this environment step, `[n_steps, n_envs]`.
        :param deltas: Predicted differences of a later sub-step's value from `values`. They leave its target as it
            is: all sub-steps of a step lead to the same next one.
        :return: `[n_steps, n_envs]`, without gradients.
        """
        del deltas
        next_values, never = next_values_from(values, values[-1]), torch.zeros_like(dones)
        return gae(rewards, values, next_values, dones, never, gamma, gae_lambda) + values.detach()

    # -- networks -----------------------------------------------------------------------------------------------------

    def _batch_shape(self, tensors: TensorDict) -> tuple[int, ...]:
        for key, tensor in tensors.items():
            if key in self._shapes:
                return tuple(tensor.shape[: tensor.dim() - len(self._shapes[key])])
        raise ConfigError(f"critic: found the observations {sorted(tensors)}, expected some of {sorted(self._shapes)}.")

    def _value(
        self,
        key: Any,
        observation: Mapping[str, Any],
        run: Run | None = None,
        batch_shape: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        tensors = as_float_tensors(observation, self._device)
        outputs = self._outputs(key, tensors, run)
        batch_shape = self._batch_shape(tensors) if batch_shape is None else batch_shape
        if self.n_quantiles:
            return outputs["value"].reshape(*batch_shape, self.n_quantiles)  # type: ignore[no-any-return]
        return self._one_value(outputs, "value", batch_shape, key)


class TorchSharedStateCritic(TorchStateCritic):
    """One value for an environment step, shared by all of its sub-steps and agents.

    The network receives the observations of all sub-steps of the step in one dictionary. Without `stack_observations`
    it can also evaluate some of the sub-steps only; the observations of the others are zero then.

    :param networks: The value network, under any key.
    :param obs_spaces_dict: Observation spaces of all sub-steps.
    :param device: Device of the network.
    :param stack_observations: Stack what several sub-steps or agents observe under the same key, see
        :func:`~maze.perception.perception_utils.stack_and_flatten_spaces`; otherwise the first sub-step's item is used.
    :raises ConfigError: There is not one network.
    """

    def __init__(
        self,
        networks: Mapping[str | int, nn.Module],
        obs_spaces_dict: dict[StepKeyType, spaces.Dict],
        device: str,
        stack_observations: bool,
    ) -> None:
        super().__init__(networks, obs_spaces_dict, device)
        if len(self.networks) != 1:
            raise ConfigError(f"critic.networks: a shared critic has one network, found {list(self.networks)}.")
        self.stack_observations = stack_observations
        self._key = next(iter(self.networks))

    @override(StateCritic)
    def predict_values(self, critic_input: StateCriticInput) -> StateCriticOutput:
        """Return one output for the whole environment step, under the first sub-step's actor."""
        values = self._merged_value(critic_input.tensor_dict, critic_input[0].run)
        return StateCriticOutput([StateCriticStepOutput(values, values.detach(), critic_input[0].actor_id)])

    @override(NetworksModel)
    def network_key(self, actor_id: ActorID | None) -> Any:
        return self._key

    @override(StateCritic)
    def predict_value(self, observation: ObservationType, critic_id: int | str) -> torch.Tensor:
        """Return the value of the observations of a single sub-step, in the shape of the batch."""
        return self._merged_value([observation])

    @override(TorchStateCritic)
    @torch.no_grad()
    def bootstrap_values(
        self, observation: ObservationType, actor: ActorID, known: Any = (), position: int = 0, run: Run | None = None
    ) -> torch.Tensor:
        return self._merged_value([*known[:position], observation, *known[position + 1 :]], run)

    def _merged_value(self, observations: Sequence[Mapping[str, Any]], run: Run | None = None) -> torch.Tensor:
        substeps = [as_float_tensors(observation, self._device) for observation in observations]
        batch_shape = self._batch_shape(substeps[0])
        if self.stack_observations:
            merged = stack_and_flatten_spaces(substeps, self.obs_spaces_dict)
        else:
            merged = substeps[0] if len(substeps) == 1 else flatten_spaces(substeps)
            absent = {key: shape for key, shape in self._shapes.items() if key not in merged}
            like = next(iter(merged.values()))
            merged = {**merged, **{key: like.new_zeros(*batch_shape, *shape) for key, shape in absent.items()}}
        return self._value(self._key, merged, run, batch_shape)


class TorchStepStateCritic(TorchStateCritic):
    """A value for each sub-step, each by a network of its own."""

    predicts_substeps = True

    @override(StateCritic)
    def predict_values(self, critic_input: StateCriticInput) -> StateCriticOutput:
        values = [self._value(self.network_key(item.actor_id), item.tensor_dict, item.run) for item in critic_input]
        pairs = zip(values, critic_input, strict=True)
        return StateCriticOutput([StateCriticStepOutput(value, value.detach(), item.actor_id) for value, item in pairs])


class TorchDeltaStateCritic(TorchStateCritic):
    """The first sub-step's value, and for each later sub-step the difference from it.

    The difference's error does not reach the first sub-step's network.
    """

    @override(StateCritic)
    def predict_values(self, critic_input: StateCriticInput) -> StateCriticOutput:
        output = StateCriticOutput()
        first_key = self.network_key(critic_input[0].actor_id)
        for index, item in enumerate(critic_input):
            key = self.network_key(item.actor_id)
            if index and key == first_key:
                raise ConfigError(
                    f"critic.networks[{key!r}]: a delta critic needs sub-steps with keys of their own, but sub-steps 0 "
                    f"and {index} are both {key!r}. Use a step or a shared critic."
                )
            values = self._value(key, item.tensor_dict)
            if index:
                values = output[0].detached_values + values
            output.append(StateCriticStepOutput(values, values.detach(), item.actor_id))
        return output

    @override(StateCritic)
    def predict_value(self, observation: ObservationType, critic_id: int | str) -> torch.Tensor:
        """Return the network's output: the first sub-step's value, or another one's difference from it."""
        return self._value(critic_id, observation)

    @override(TorchStateCritic)
    @torch.no_grad()
    def bootstrap_values(
        self, observation: ObservationType, actor: ActorID, known: Any = (), position: int = 0, run: Run | None = None
    ) -> torch.Tensor:
        first_key = next(iter(self.networks))
        predicted = self._value(actor[0], observation)
        if actor[0] == first_key:
            return predicted
        if not known or position < 1:
            raise ConfigError(
                f"A delta critic cannot value an observation of sub-step {actor[0]!r} without that of the first "
                "sub-step. Use a step or a shared critic where episodes start or end within an environment step."
            )
        return self._value(first_key, known[0]) + predicted
