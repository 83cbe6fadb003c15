"""Many perturbed versions of one policy, asked together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from maze.core.agent.acting import Actor
from maze.core.agent.compiled_network import CompiledNetwork, compile_network
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.env.structured_env import ActorID
from maze.perception.blocks.numpy_forward import array_function
from maze.perception.models.built_in.flatten_concat import FlattenConcatPolicyNet
from maze.train.trainers.es.es_utils import n_trained_parameters, trained_parameters

if TYPE_CHECKING:
    from maze.core.env.structured_env import StepKeyType

Arrays = dict[str, np.ndarray]
Rows = slice | np.ndarray

MAX_NUMBERS = 1 << 25
"""The parameters of a population take up at most 128 MiB, unless there is only a single policy in it."""


class Population:
    """The parameters of perturbed policies in the rows of one matrix; a forward pass is a batched matrix product.

    Actions are the most probable ones. Stacks of dense layers run as stacked products in NumPy, other networks with a
    NumPy form row by row, the rest is mapped over the rows by ``torch.func.vmap``. In NumPy a policy's result is the
    same in any company.

    :param policy: The policy; its networks are used for their structure only.
    :param n_rows: Number of perturbed policies.
    """

    def __init__(self, policy: TorchPolicy, n_rows: int) -> None:
        policy.eval()
        parameters = trained_parameters(policy)
        offsets = np.cumsum([0, *(parameter.numel() for parameter in parameters)]).tolist()
        self.parameters = np.zeros((n_rows, offsets[-1]), np.float32)
        """float32 ``[n_rows, n_parameters]``, in the order of ``trained_parameters(policy)``."""
        stacked = {
            id(parameter): self.parameters[:, start:end].reshape(n_rows, *parameter.shape)
            for parameter, start, end in zip(parameters, offsets[:-1], offsets[1:], strict=True)
        }
        self._policy = policy
        self._networks: dict[Any, PopulationNetwork] = {}
        self._actors: dict[Any, Actor] = {}
        rng, generator = np.random.default_rng(0), torch.Generator()  # nothing is drawn: actions are deterministic
        for key, network in policy.networks.items():
            named = network.named_parameters()
            own = {name: stacked[id(parameter)] for name, parameter in named if id(parameter) in stacked}
            self._networks[key] = PopulationNetwork(network, own)
            mapper = policy.distribution_mapper
            self._actors[key] = Actor(self._networks[key], mapper, rng, generator, "cpu", str(key))

    def act(self, actor_id: ActorID, observations: Mapping[str, np.ndarray], rows: Rows) -> Arrays:
        """Actions of some of the policies, each for an observation of its own.

        :param actor_id: Who acts.
        :param observations: Arrays ``[len(rows), ...]``.
        :param rows: The policies.
        """
        key = self._policy._network_key(actor_id)
        self._networks[key].rows = rows
        return self._actors[key].act(observations, deterministic=True)


def population_size(policy: TorchPolicy, n_wanted: int) -> int:
    """How many policies are evaluated together at most.

    :param policy: The policy.
    :param n_wanted: Number that would be welcome.
    """
    return max(1, min(n_wanted, MAX_NUMBERS // max(1, n_trained_parameters(policy))))


def obstacle_to_batching(policy: Any, observation_spaces_dict: Mapping[StepKeyType, Any]) -> str | None:
    """Why perturbed versions of this policy cannot be asked together; ``None``: they can.

    :param policy: Any policy.
    :param observation_spaces_dict: Observation spaces by sub-step key.
    """
    if type(policy) is not TorchPolicy:
        return f"{type(policy).__name__} chooses actions in its own way"
    if policy.device != "cpu":
        return f"its networks are on {policy.device}"
    population = Population(policy, 1)
    try:
        for key in policy.networks:
            actor = ActorID(*key) if isinstance(key, tuple) else ActorID(key, 0)
            observation = {
                name: np.zeros((1, *space.shape), space.dtype)
                for name, space in observation_spaces_dict[actor.step_key].items()
            }
            population.act(actor, observation, slice(0, 1))
    except RuntimeError as error:  # vmap's way of saying that an operation cannot be mapped
        return f"torch.func.vmap cannot map one of its networks: {str(error).splitlines()[0]}"
    return None


class PopulationNetwork(nn.Module):
    """One network with many sets of parameters.

    :param network: The network.
    :param stacked: For each of its trained parameters an array ``[n_rows, *shape]``; its memory is read at every call.
    """

    def __init__(self, network: nn.Module, stacked: Mapping[str, np.ndarray]) -> None:
        super().__init__()
        self.network = network
        self.rows: Rows = slice(0, 0)
        """Whose parameters are used, for the observation at the same place in the batch."""
        self._stacked = dict(stacked)
        self._tensors = {name: torch.from_numpy(array) for name, array in stacked.items()}

    def forward(self, x: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The network's outputs ``[batch, ...]``."""
        rows = self.rows if isinstance(self.rows, slice) else torch.from_numpy(self.rows)
        parameters = {name: tensor[rows] for name, tensor in self._tensors.items()}
        outputs: dict[str, torch.Tensor] = torch.func.vmap(self._forward_one)(parameters, dict(x))
        return outputs

    def _forward_one(self, parameters: dict[str, torch.Tensor], x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        batch_of_one = {key: value.unsqueeze(0) for key, value in x.items()}
        outputs = torch.func.functional_call(self.network, parameters, (batch_of_one,))
        return {key: value.squeeze(0) for key, value in outputs.items()}

    def numpy_program(self) -> Callable[[Mapping[str, np.ndarray]], Arrays] | None:
        """The forward pass in NumPy, see :mod:`maze.core.agent.compiled_network`."""
        network = self.network
        if compile_network(network) is None:
            return None
        has_frozen = any(name not in self._stacked for name, _ in network.named_parameters())
        if type(network) is not FlattenConcatPolicyNet or has_frozen:
            return self._row_by_row()
        hidden = [self._layer(f"hidden.{index}", layer) for index, layer in enumerate(network.hidden)]
        heads = [
            (head, shape, self._layer(f"heads.{index}", network.heads[index]))
            for index, (head, shape) in enumerate(network._head_shapes.items())
        ]
        keys = list(network._obs_shapes)

        def forward(x: Mapping[str, np.ndarray]) -> Arrays:
            columns = [x[key].reshape(len(x[key]), -1, 1) for key in keys]
            latent = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
            for layer in hidden:
                latent = layer(latent)  # type: ignore[misc]  # none of them is None
            return {
                head: layer(latent).reshape(len(latent), *shape)  # type: ignore[misc]  # a linear layer
                for head, shape, layer in heads
            }

        return forward

    def _row_by_row(self) -> Callable[[Mapping[str, np.ndarray]], Arrays]:
        """The network's own NumPy program for each set of parameters: still far cheaper than torch."""
        programs: dict[int, CompiledNetwork] = {}

        def forward(x: Mapping[str, np.ndarray]) -> Arrays:
            rows = range(self.rows.stop) if isinstance(self.rows, slice) else self.rows.tolist()
            outputs = []
            for position, row in enumerate(rows):
                if row not in programs:
                    programs[row] = self._compiled_row(row)
                outputs.append(programs[row]({key: value[position : position + 1] for key, value in x.items()}))
            return {key: np.concatenate([output[key] for output in outputs]) for key in outputs[0]}

        return forward

    def _compiled_row(self, row: int) -> CompiledNetwork:
        network = copy.deepcopy(self.network)
        for name, parameter in network.named_parameters():
            if name in self._stacked:
                parameter.data = torch.from_numpy(self._stacked[name][row])
        compiled = compile_network(network)
        assert compiled is not None, "the network it is a copy of could be compiled"
        return compiled

    def _layer(self, name: str, layer: nn.Module) -> Callable[[np.ndarray], np.ndarray] | None:
        """A layer as a function of columns ``[batch, features, 1]``; ``None``: it has no NumPy form."""
        if type(layer) is not nn.Linear:
            return array_function(layer)
        weight, bias = self._stacked[f"{name}.weight"], self._stacked[f"{name}.bias"][..., np.newaxis]

        def linear(x: np.ndarray) -> np.ndarray:
            result: np.ndarray = np.matmul(weight[self.rows], x)
            result += bias[self.rows]
            return result

        return linear
