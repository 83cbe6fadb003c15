"""Acting: from a batch of observations to actions, without gradients and mostly without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from maze.core.agent.networks import as_float_tensors
from maze.core.errors import ConfigError, EnvironmentContractError, NonFiniteError
from maze.distributions.bernoulli import BernoulliProbabilityDistribution
from maze.distributions.categorical import CategoricalProbabilityDistribution
from maze.distributions.gaussian import MAX_LOG_STD, MIN_LOG_STD, DiagonalGaussianProbabilityDistribution
from maze.distributions.greedy import (
    GreedyCategoricalProbabilityDistribution,
    GreedyMultiCategoricalProbabilityDistribution,
)
from maze.distributions.multi_categorical import MultiCategoricalProbabilityDistribution
from maze.distributions.squashed_gaussian import (
    MAX_LOG_STD_BEFORE_SQUASHING,
    SquashedGaussianProbabilityDistribution,
)
from maze.distributions.utils import require_valid_rows, sample_with
from maze.perception.program.numpy_networks import NumpyNetwork, in_numpy

if TYPE_CHECKING:
    from maze.distributions.distribution_mapper import DistributionMapper

Sampler = Callable[[np.ndarray, bool], np.ndarray]
"""From logits `[batch, ...]` and `deterministic` to actions `[batch, ...]`."""
NumpyFunction = Callable[[Mapping[str, np.ndarray]], Mapping[str, Any]]
"""From observations `[batch, ...]` to a network's outputs by key."""

_MULTI_CATEGORICAL = (MultiCategoricalProbabilityDistribution, GreedyMultiCategoricalProbabilityDistribution)
_TINY = np.finfo(np.float64).tiny


class ActionHeads:
    """From a network's outputs to actions.

    Actions of the default distributions are drawn in NumPy from `rng`; any other distribution is asked itself and
    draws from `torch_generator`.

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
        heads = distribution_mapper.action_heads
        self._samplers = {head: _sampler_for(head, distribution_mapper, rng, torch_generator) for head in heads}
        self._categorical_sizes = {head: _categorical_sizes(head, distribution_mapper) for head in heads}

    def act(
        self,
        network: NumpyFunction,
        observation: Mapping[str, np.ndarray],
        deterministic: bool = False,
        out: dict[str, np.ndarray] | None = None,
        logits_out: dict[str, np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """Chooses actions.

        :param network: From observations to logits.

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
        n_heads = 0
        for head, sampler in self._samplers.items():
            logits = all_logits.get(head)
            if logits is None:
                continue
            n_heads += 1
            self._check(head, logits)
            if logits_out is not None:
                np.copyto(logits_out[head], logits, casting="unsafe")
            drawn = sampler(logits, deterministic)
            if out is None:
                actions[head] = drawn
            else:
                np.copyto(out[head], drawn, casting="unsafe")
        if n_heads == 0:
            raise ConfigError(
                f"policy.networks[{self._name}] returned {sorted(map(str, all_logits))}, none of which is an action "
                f"head. Expected some of: {', '.join(self._samplers)}."
            )
        return actions

    def as_arrays(self, outputs: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        """The logits among a network's outputs as arrays; all outputs where there are none.

        Each is `[batch, ...]`.
        """
        logits: dict[str, Any] = {head: outputs[head].detach().cpu() for head in self._samplers if head in outputs}
        for head, sizes in self._categorical_sizes.items():
            if sizes and head in logits:
                for part in logits[head].split(sizes, dim=-1):
                    require_valid_rows(part, head)
        # half precision types that NumPy lacks become float32, which holds all of their values
        return {
            head: (value if value.dtype in (torch.float32, torch.float64) else value.float()).numpy()
            for head, value in logits.items()
        } or outputs

    def _check(self, head: str, logits: np.ndarray) -> None:
        # the maximum is NaN if any logit is; minus infinity masks a choice, and makes no sense elsewhere
        is_categorical = bool(self._categorical_sizes[head])
        if logits.max() < np.inf and (is_categorical or logits.min() > -np.inf):
            return
        broken = np.isnan(logits) | (logits == np.inf)
        if not is_categorical:
            broken |= np.isinf(logits)
        row = int(np.argwhere(broken)[0][0])
        error = NonFiniteError(
            f"policy.networks[{self._name}]: the logits of action head `{head}` are not finite in row {row} of "
            f"{len(logits)}: {logits[row]}. Look for diverged weights."
        )
        error.row = row
        raise error


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
    ) -> dict[str, np.ndarray]:
        """See :meth:`maze.core.agent.torch_policy.TorchPolicy.compute_actions`."""
        network = self._in_numpy
        if network is not None and not network.is_current():
            network = self._in_numpy = self._compiled()
        return self._heads.act(network or self._in_torch, observation, deterministic, out, logits_out)

    def _compiled(self) -> NumpyNetwork | None:
        return in_numpy(self._network) if self._device == "cpu" else None

    @torch.inference_mode()
    def _in_torch(self, observation: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        return self._heads.as_arrays(self._network(as_float_tensors(observation, self._device)))


def _categorical_sizes(head: str, mapper: DistributionMapper) -> list[int]:
    """How a head's logits split into categorical choices; empty for other distributions."""
    distribution, space = mapper.distribution_class(head), mapper.action_space.spaces[head]
    if issubclass(distribution, CategoricalProbabilityDistribution) and isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if issubclass(distribution, MultiCategoricalProbabilityDistribution) and isinstance(space, spaces.MultiDiscrete):
        return [int(size) for size in space.nvec.flatten()]
    return []


def _sampler_for(
    head: str, mapper: DistributionMapper, rng: np.random.Generator, torch_generator: torch.Generator
) -> Sampler:
    """The NumPy sampler of exactly the default distributions; subclasses and all others are asked themselves."""
    distribution, space = mapper.distribution_class(head), mapper.action_space.spaces[head]
    if distribution in (CategoricalProbabilityDistribution, GreedyCategoricalProbabilityDistribution):
        return _Categorical(rng, is_greedy=distribution is GreedyCategoricalProbabilityDistribution)
    if distribution in _MULTI_CATEGORICAL and isinstance(space, spaces.MultiDiscrete):
        return _MultiCategorical(rng, space, is_greedy=distribution is GreedyMultiCategoricalProbabilityDistribution)
    if distribution is BernoulliProbabilityDistribution:
        return _Bernoulli(rng)
    if distribution is DiagonalGaussianProbabilityDistribution:
        return _Gaussian(rng, space)
    if distribution is SquashedGaussianProbabilityDistribution and isinstance(space, spaces.Box):
        return _SquashedGaussian(rng, space)
    return _DistributionObject(head, mapper, torch_generator)


class _Categorical:
    """Exponential race: argmax of logit - log(exponential noise) follows the softmax of the logits."""

    def __init__(self, rng: np.random.Generator, is_greedy: bool = False) -> None:
        self._rng = rng
        self._is_greedy = is_greedy
        self._buffers: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, logits: np.ndarray, deterministic: bool) -> np.ndarray:
        choices: np.ndarray
        if deterministic or self._is_greedy:
            choices = logits.argmax(-1)
            return choices
        noise = self._buffers.get(logits.shape)
        if noise is None:
            noise = self._buffers[logits.shape] = np.empty(logits.shape, np.float64)
        self._rng.standard_exponential(out=noise)
        np.add(noise, _TINY, noise)  # zero has no logarithm
        np.log(noise, noise)
        np.subtract(logits, noise, noise)
        choices = noise.argmax(-1)
        return choices


class _MultiCategorical:
    def __init__(self, rng: np.random.Generator, space: spaces.MultiDiscrete, is_greedy: bool) -> None:
        self._choose = _Categorical(rng, is_greedy)
        self._shape = space.nvec.shape
        ends = np.cumsum(space.nvec.flatten()).tolist()
        self._slices = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def __call__(self, logits: np.ndarray, deterministic: bool) -> np.ndarray:
        actions = np.empty((len(logits), len(self._slices)), np.int64)
        for index, part in enumerate(self._slices):
            actions[:, index] = self._choose(logits[:, part], deterministic)
        shaped: np.ndarray = actions.reshape(len(logits), *self._shape)
        return shaped


class _Bernoulli:
    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def __call__(self, logits: np.ndarray, deterministic: bool) -> np.ndarray:
        if deterministic:
            return (logits > 0).astype(np.int8)
        probability = 0.5 + 0.5 * np.tanh(0.5 * logits)
        ones: np.ndarray = self._rng.random(logits.shape) < probability
        return ones.astype(np.int8)


class _Gaussian:
    def __init__(self, rng: np.random.Generator, space: spaces.Space[Any]) -> None:
        self._rng = rng
        self._shape = space.shape or ()
        self._dtype = space.dtype

    def __call__(self, logits: np.ndarray, deterministic: bool) -> np.ndarray:
        n_components = logits.shape[-1] // 2
        mean = logits[..., :n_components]
        if deterministic:
            actions = mean
        else:
            std = np.exp(np.clip(logits[..., n_components:], MIN_LOG_STD, MAX_LOG_STD))
            actions = mean + std * self._rng.standard_normal(mean.shape, dtype=np.float32)
        return actions.reshape(len(logits), *self._shape).astype(self._dtype)  # a copy: logits are a reused buffer


class _SquashedGaussian:
    def __init__(self, rng: np.random.Generator, space: spaces.Box) -> None:
        self._rng = rng
        self._shape = space.shape
        self._dtype = space.dtype
        self._low, self._high = space.low, space.high
        self._start = space.low.astype(np.float32)
        self._half_width = np.float32(0.5) * (space.high.astype(np.float32) - self._start)

    def __call__(self, logits: np.ndarray, deterministic: bool) -> np.ndarray:
        n_components = logits.shape[-1] // 2
        unsquashed = logits[..., :n_components]
        if not deterministic:
            log_std = np.minimum(logits[..., n_components:], MAX_LOG_STD_BEFORE_SQUASHING)
            std = np.exp(np.maximum(log_std, MIN_LOG_STD, out=log_std), out=log_std)
            std *= self._rng.standard_normal(std.shape, dtype=np.float32)
            unsquashed = np.add(std, unsquashed, out=std)
        squashed = np.tanh(unsquashed).reshape(len(logits), *self._shape)
        squashed += 1.0
        squashed *= self._half_width
        squashed += self._start
        actions: np.ndarray = squashed.astype(self._dtype, copy=False)
        np.minimum(actions, self._high, out=actions)  # rounding can lead outside
        np.maximum(actions, self._low, out=actions)
        return actions


class _DistributionObject:
    def __init__(self, head: str, mapper: DistributionMapper, generator: torch.Generator) -> None:
        self._head = head
        self._mapper = mapper
        self._generator = generator
        self._dtype = mapper.action_space.spaces[head].dtype

    def __call__(self, logits: np.ndarray, deterministic: bool) -> np.ndarray:
        with torch.inference_mode():
            distribution = self._mapper.action_head_distribution(self._head, torch.from_numpy(logits), 1.0)
            drawn = distribution.deterministic_sample() if deterministic else sample_with(distribution, self._generator)
        return np.asarray(drawn.numpy().astype(self._dtype))
