"""Acting: from a batch of observations to actions, without gradients and mostly without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from maze.core.agent.networks import as_float_tensors
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.distributions.categorical import CategoricalProbabilityDistribution
from maze.distributions.multi_categorical import MultiCategoricalProbabilityDistribution
from maze.distributions.samplers import Sampler, check_logits, sampler_of
from maze.distributions.utils import require_valid_rows, sample_with
from maze.perception.blocks.recurrent.recurrent_cell import StepRun, recurrent_cells, running
from maze.perception.program.numpy_networks import NumpyNetwork, in_numpy

if TYPE_CHECKING:
    from maze.distributions.distribution_mapper import DistributionMapper

NumpyFunction = Callable[[Mapping[str, np.ndarray]], Mapping[str, Any]]
"""From observations `[batch, ...]` to a network's outputs by key."""


class ActionHeads:
    """From a network's outputs to actions.

    Actions of the default distributions are sampled in NumPy from `rng`; any other distribution samples by itself, from
    `torch_generator`.

    :param distribution_mapper: Knows the heads.
    :param rng: Generator for drawing in NumPy.
    :param torch_generator: Generator (on the CPU) for drawing in torch.
    :param name: Name of the network in messages.
    """

    def __init__(
        self,
        distribution_mapper: DistributionMapper,
        rng: np.random.Generator,
        torch_generator: torch.Generator,
        name: str,
    ) -> None:
        self._name = name
        self._where = f"policy.networks[{name}]"
        self._rng = rng
        mapper = distribution_mapper
        self._heads = [
            (head, _sampler_for(head, mapper, torch_generator), _categorical_sizes(head, mapper))
            for head in mapper.action_heads
        ]
        """Name, sampler, and how the logits split into categorical choices."""

    def act(
        self,
        network: NumpyFunction,
        observation: Mapping[str, np.ndarray],
        deterministic: bool = False,
        out: dict[str, np.ndarray] | None = None,
        logits_out: dict[str, np.ndarray] | None = None,
        temperature: float = 1.0,
    ) -> dict[str, np.ndarray]:
        """Choose actions.

        :param network: From observations to logits.

        :param temperature: Of the distributions that are drawn from.

        The other arguments are those of :meth:`maze.core.agent.torch_policy.TorchPolicy.compute_actions`.
        :return: Actions `[batch, *space.shape]` by head.
        :raises ConfigError: The network does not return logits of the right shape for each head.
        """
        try:
            all_logits = network(observation)
        except EnvironmentContractError as error:
            named = EnvironmentContractError(f"Sub-step {self._name}: {error}")
            named.row = error.row
            raise named from error
        actions: dict[str, np.ndarray] = {} if out is None else out
        n_heads, rng = 0, None if deterministic else self._rng
        for head, sampler, sizes in self._heads:
            logits = all_logits.get(head)
            if logits is None:
                continue
            n_heads += 1
            check_logits(logits, sizes, head, self._where)
            if logits_out is not None:
                logits_out[head][...] = logits
            drawn = sampler(logits, rng, temperature)
            if out is None:
                actions[head] = drawn
            else:
                out[head][...] = drawn
        if n_heads == 0:
            raise ConfigError(
                f"{self._where} returned {sorted(map(str, all_logits))}, none of which is an action head. Expected "
                f"some of: {', '.join(head for head, _, _ in self._heads)}."
            )
        return actions

    def as_arrays(self, outputs: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        """Return the logits among a network's outputs as arrays; all outputs where there are none.

        Each is `[batch, ...]`.
        """
        logits: dict[str, Any] = {}
        for head, _, sizes in self._heads:
            if head in outputs:
                of_head: Any = outputs[head].detach().cpu()
                logits[head] = of_head
                for part in of_head.split(sizes, dim=-1) if len(sizes) > 1 else [of_head] * len(sizes):
                    require_valid_rows(part, head)
        # half precision types that NumPy lacks become float32, which holds all of their values
        return {
            head: (value if value.dtype in (torch.float32, torch.float64) else value.float()).numpy()
            for head, value in logits.items()
        } or outputs


class Actor:
    """One network together with its action heads.

    The network runs in NumPy where that is possible, else in torch's inference mode.

    :param network: Maps observations to logits.
    :param heads: Its action heads.
    :param device: Device of the network.
    """

    def __init__(self, network: nn.Module, heads: ActionHeads, device: str) -> None:
        self._network = network
        self._heads = heads
        self._device = device
        self._cells = list(recurrent_cells(network).values())
        self._in_numpy = self._compiled()

    @property
    def runs_in_numpy(self) -> bool:
        """Whether the network's forward pass is computed without torch."""
        return self._in_numpy is not None

    def act(
        self,
        observation: Mapping[str, np.ndarray],
        deterministic: bool = False,
        out: dict[str, np.ndarray] | None = None,
        logits_out: dict[str, np.ndarray] | None = None,
        states: dict[str, np.ndarray] | None = None,
        temperature: float = 1.0,
    ) -> dict[str, np.ndarray]:
        """Return actions `[n_envs, ...]`, see :meth:`maze.core.agent.torch_policy.TorchPolicy.compute_actions`."""
        network = self._in_numpy
        if network is not None and not network.is_current():
            network = self._in_numpy = self._compiled()
        forward: NumpyFunction = network or self._in_torch
        if self._cells:
            assert states is not None, "passed by the policy"
            forward = partial(self._carried, states)
        return self._heads.act(forward, observation, deterministic, out, logits_out, temperature)

    def _compiled(self) -> NumpyNetwork | None:
        return in_numpy(self._network) if self._device == "cpu" else None

    def _carried(self, states: dict[str, np.ndarray], observation: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        outputs: Mapping[str, Any]
        if self._in_numpy is not None:
            final = outputs = self._in_numpy({**observation, **states})
        else:
            run = StepRun(as_float_tensors(states, self._device))
            with running(self._cells, run):
                outputs = self._in_torch(observation)
            final = {key: tensor.cpu().numpy() for key, tensor in run.final.items()}
        for key, array in states.items():
            array[...] = final[key]
        return outputs

    @torch.inference_mode()
    def _in_torch(self, observation: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        return self._heads.as_arrays(self._network(as_float_tensors(observation, self._device)))


def _categorical_sizes(head: str, mapper: DistributionMapper) -> list[int]:
    """Return how a head's logits split into categorical choices, subclasses included; empty for other distributions."""
    distribution, space = mapper.distribution_class(head), mapper.action_space.spaces[head]
    if issubclass(distribution, CategoricalProbabilityDistribution) and isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if issubclass(distribution, MultiCategoricalProbabilityDistribution) and isinstance(space, spaces.MultiDiscrete):
        return [int(size) for size in space.nvec.flatten()]
    return []


def _sampler_for(head: str, mapper: DistributionMapper, generator: torch.Generator) -> Sampler:
    """Return the NumPy sampler of the usual distributions; subclasses and all others sample by themselves."""
    description = mapper.describe_head(head)
    if description is not None:
        return sampler_of(description)
    dtype = mapper.action_space.spaces[head].dtype

    def sample(logits: np.ndarray, rng: np.random.Generator | None, temperature: float = 1.0) -> np.ndarray:
        with torch.inference_mode():
            distribution = mapper.action_head_distribution(head, torch.from_numpy(logits), temperature)
            drawn = distribution.deterministic_sample() if rng is None else sample_with(distribution, generator)
        return np.asarray(drawn.numpy().astype(dtype))

    return sample
