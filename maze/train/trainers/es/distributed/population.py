"""Many perturbed versions of one policy, asked together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from maze.core.agent.acting import ActionHeads
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.env.structured_env import ActorID
from maze.perception.program.network_program import TorchPopulation
from maze.perception.program.numpy_networks import Rows, population_in_numpy
from maze.train.trainers.es.es_utils import n_trained_parameters, trained_parameters

if TYPE_CHECKING:
    from maze.core.env.structured_env import StepKeyType

MAX_NUMBERS = 1 << 25
"""The parameters of a population take up at most 128 MiB, unless there is only a single policy in it."""


class Population:
    """The parameters of perturbed policies in the rows of one matrix; a forward pass is a batched matrix product.

    Actions are the most probable ones. Networks run in NumPy where they can be read as programs, and there a policy's
    result is the same in any company; others are mapped over the rows by `torch.func.vmap`.

    :param policy: The policy; its networks are used for their structure only.
    :param n_rows: Number of perturbed policies.
    """

    def __init__(self, policy: TorchPolicy, n_rows: int) -> None:
        policy.eval()
        parameters = trained_parameters(policy)
        offsets = np.cumsum([0, *(parameter.numel() for parameter in parameters)]).tolist()
        self.parameters = np.zeros((n_rows, offsets[-1]), np.float32)
        """float32 `[n_rows, n_parameters]`, in the order of `trained_parameters(policy)`."""
        stacked = {
            id(parameter): self.parameters[:, start:end].reshape(n_rows, *parameter.shape)
            for parameter, start, end in zip(parameters, offsets[:-1], offsets[1:], strict=True)
        }
        self._policy = policy
        rng, generator = np.random.default_rng(0), torch.Generator()  # nothing is drawn: actions are deterministic
        mapper = policy.distribution_mapper
        self._heads = {key: ActionHeads(mapper, rng, generator, str(key)) for key in policy.networks}
        self._networks = {
            key: _network_function(network, stacked, self._heads[key]) for key, network in policy.networks.items()
        }

    def act(self, actor_id: ActorID, observations: Mapping[str, np.ndarray], rows: Rows) -> dict[str, np.ndarray]:
        """Actions of some of the policies, each for an observation of its own.

        :param actor_id: Who acts.
        :param observations: Arrays `[len(rows), ...]`.
        :param rows: The policies.
        """
        key = self._policy._network_key(actor_id)
        network = self._networks[key]
        return self._heads[key].act(lambda x: network(x, rows), observations, deterministic=True)


def population_size(policy: TorchPolicy, n_wanted: int) -> int:
    """How many policies are evaluated together at most.

    :param policy: The policy.
    :param n_wanted: Number that would be welcome.
    """
    return max(1, min(n_wanted, MAX_NUMBERS // max(1, n_trained_parameters(policy))))


def obstacle_to_batching(policy: Any, observation_spaces_dict: Mapping[StepKeyType, Any]) -> str | None:
    """Why perturbed versions of this policy cannot be asked together; `None`: they can.

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
            spaces_of_step = observation_spaces_dict[actor.step_key]
            observation = {name: _usual_row(space) for name, space in spaces_of_step.items()}
            population.act(actor, observation, slice(0, 1))
    except RuntimeError as error:  # vmap's way of saying that an operation cannot be mapped
        return f"torch.func.vmap cannot map one of its networks: {str(error).splitlines()[0]}"
    return None


def _usual_row(space: spaces.Space[Any]) -> np.ndarray:
    """One row of ones as far as they are in the space: a mask of zeros would permit no action."""
    row = np.ones((1, *(space.shape or ())), space.dtype)
    if isinstance(space, spaces.Box):
        return np.clip(row, space.low, space.high)
    if isinstance(space, spaces.MultiBinary):
        return row
    return row * getattr(space, "start", 0)  # Discrete and MultiDiscrete


def _network_function(
    network: nn.Module, stacked: Mapping[int, np.ndarray], heads: ActionHeads
) -> Callable[[Mapping[str, np.ndarray], Rows], Mapping[str, Any]]:
    """From observations and the rows of their policies to logits."""
    in_numpy = population_in_numpy(network, stacked)
    if in_numpy is not None:
        return in_numpy
    in_torch = TorchPopulation(network, stacked)
    return lambda observations, rows: heads.as_arrays(in_torch(observations, rows))
