"""Which distribution belongs to which action head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from gymnasium import spaces

from maze.core.errors import ConfigError, unknown_key_error
from maze.core.utils.factory import Factory
from maze.distributions.bernoulli import BernoulliProbabilityDistribution
from maze.distributions.beta import BetaProbabilityDistribution
from maze.distributions.categorical import CategoricalProbabilityDistribution, GreedyCategoricalProbabilityDistribution
from maze.distributions.dict import DictProbabilityDistribution
from maze.distributions.distribution import ProbabilityDistribution
from maze.distributions.gaussian import DiagonalGaussianProbabilityDistribution
from maze.distributions.multi_categorical import (
    GreedyMultiCategoricalProbabilityDistribution,
    MultiCategoricalProbabilityDistribution,
)
from maze.distributions.samplers import HeadDescription
from maze.distributions.squashed_gaussian import SquashedGaussianProbabilityDistribution

_CONFIG = "distribution_mapper_config"
_DESCRIBED: Mapping[type[Any], tuple[str, bool]] = {
    BernoulliProbabilityDistribution: ("bernoulli", False),
    BetaProbabilityDistribution: ("beta", False),
    CategoricalProbabilityDistribution: ("categorical", False),
    DiagonalGaussianProbabilityDistribution: ("gaussian", False),
    GreedyCategoricalProbabilityDistribution: ("categorical", True),
    GreedyMultiCategoricalProbabilityDistribution: ("multi_categorical", True),
    MultiCategoricalProbabilityDistribution: ("multi_categorical", False),
    SquashedGaussianProbabilityDistribution: ("squashed_gaussian", False),
}
"""Name of the sampler, and whether it always samples the greedy action."""


class DistributionMapper:
    """Pick a distribution for each action head: by the type of its space, unless configured otherwise.

    Entries of the configuration are read from top to bottom, and the last one that fits a head decides:

    * `{action_space: gym.spaces.Box, distribution: <class or import path>}` for all heads of a space type,
    * `{action_head: special_action, distribution: ...}` for one head,
    * either of them with `bounded: true` for `Box` heads only whose components all have finite bounds.

    >>> mapper = DistributionMapper(spaces.Dict({"action": spaces.Discrete(3)}), {})
    >>> mapper.required_logits_shape("action")
    (3,)

    :param action_space: All action heads; of a structured environment those of all sub-steps.
    :param distribution_mapper_config: The entries, as a list or as the values of a mapping.
    :raises ConfigError: The space is not a dictionary, a head is unknown, or a distribution does not fit it.
    """

    default_mapping: ClassVar[dict[type[Any], type[Any]]] = {
        spaces.Discrete: CategoricalProbabilityDistribution,
        spaces.MultiDiscrete: MultiCategoricalProbabilityDistribution,
        spaces.MultiBinary: BernoulliProbabilityDistribution,
        spaces.Box: DiagonalGaussianProbabilityDistribution,
    }

    def __init__(self, action_space: spaces.Dict, distribution_mapper_config: Any) -> None:
        if not isinstance(action_space, spaces.Dict):
            raise ConfigError(
                f"DistributionMapper needs a Dict of action heads, found {action_space}. Wrap the space: "
                '`spaces.Dict({"action": ...})`.'
            )
        self.action_space = action_space
        self._distributions = {head: self._default_for(head, space) for head, space in action_space.spaces.items()}
        for index, entry in enumerate(_entries(distribution_mapper_config)):
            self._apply(entry, f"{_CONFIG}[{index}]")
        self._logits_shapes = {head: self._checked_logits_shape(head) for head in self._distributions}
        self.candidate_heads: frozenset[str] = frozenset()
        """`Discrete` heads with as many choices as there are candidates, in training or elsewhere."""

    @property
    def action_heads(self) -> Sequence[str]:
        """Names of all action heads."""
        return tuple(self._distributions)

    def distribution_class(self, action_head: str) -> type[Any]:
        """Return the distribution's class of an action head."""
        self._require_head(action_head, "action head")
        return self._distributions[action_head]

    def describe_head(self, action_head: str) -> HeadDescription | None:
        """Return the distribution of an action head as data, for sampling without torch.

        :return: None where only the distribution itself knows: subclasses of the usual ones, and all others.
        """
        distribution, space = self.distribution_class(action_head), self.action_space.spaces[action_head]
        if distribution not in _DESCRIBED:
            return None
        name, is_greedy = _DESCRIBED[distribution]
        if isinstance(space, spaces.Discrete):
            return {"distribution": name, "n": int(space.n), "is_greedy": is_greedy}
        if isinstance(space, spaces.MultiDiscrete):
            return {"distribution": name, "nvec": space.nvec.copy(), "is_greedy": is_greedy}
        description = {"distribution": name, "shape": tuple(space.shape or ()), "dtype": str(space.dtype)}
        if name in ("beta", "squashed_gaussian") and isinstance(space, spaces.Box):
            description |= {"low": space.low.copy(), "high": space.high.copy()}
        return description

    def required_logits_shape(self, action_head: str) -> Sequence[int]:
        """Return the shape of the logits of an action head, without batch dimensions."""
        self._require_head(action_head, "action head")
        return self._logits_shapes[action_head]

    def action_head_distribution(
        self, action_head: str, logits: torch.Tensor, temperature: float
    ) -> ProbabilityDistribution:
        """Return the distribution of one action head.

        :param logits: `[..., *required_logits_shape(action_head)]`.
        :param temperature: Below 1 sharpens the distribution, above 1 flattens it.
        :raises ConfigError: The logits have another shape than the distribution needs.
        """
        shape = self.required_logits_shape(action_head)
        fits = tuple(logits.shape[logits.dim() - len(shape) :]) == tuple(shape)
        if not fits and not (action_head in self.candidate_heads and logits.dim()):
            raise ConfigError(
                f"Action head `{action_head}`: the network returned logits of shape {tuple(logits.shape)}, expected "
                f"them to end with {tuple(shape)} for {self.action_space[action_head]}."
            )
        distribution = self._distributions[action_head](
            logits=logits, action_space=self.action_space.spaces[action_head], temperature=temperature
        )
        return cast(ProbabilityDistribution, distribution)

    def logits_dict_to_distribution(
        self, logits_dict: Mapping[str, torch.Tensor], temperature: float
    ) -> DictProbabilityDistribution:
        """Return the joint distribution of the action heads that logits are given for.

        :param logits_dict: Logits by head, `[..., *logits_shape]`.
        """
        return DictProbabilityDistribution(
            {head: self.action_head_distribution(head, logits, temperature) for head, logits in logits_dict.items()}
        )

    def _default_for(self, head: str, space: spaces.Space[Any]) -> type[Any]:
        for space_type, distribution in self.default_mapping.items():
            if isinstance(space, space_type):
                return distribution
        known = ", ".join(space_type.__name__ for space_type in self.default_mapping)
        raise ConfigError(f"Action head `{head}`: there is no distribution for {space}. Supported are {known}.")

    def _apply(self, entry: Mapping[str, Any], where: str) -> None:
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where}: expected a mapping with `distribution`, found {entry!r}.")
        known = {"action_space", "action_head", "bounded", "distribution"}
        if not set(entry) <= known or "distribution" not in entry or len(entry) < 2:
            raise ConfigError(
                f"{where}: expected `distribution` and `action_space` or `action_head`, perhaps with `bounded`, "
                f"found {sorted(map(str, entry))}."
            )
        distribution = _distribution_type(entry["distribution"], f"{where}.distribution")
        heads: Iterable[str] = self._distributions
        if entry.get("action_head") is not None:
            self._require_head(entry["action_head"], f"{where}.action_head")
            heads = [entry["action_head"]]
        if entry.get("action_space") is not None:
            space_type = _space_type(entry["action_space"], f"{where}.action_space")
            heads = [head for head in heads if isinstance(self.action_space.spaces[head], space_type)]
        for head in list(heads):
            space = self.action_space.spaces[head]
            if not entry.get("bounded") or (isinstance(space, spaces.Box) and space.is_bounded()):
                self._distributions[head] = distribution

    def _checked_logits_shape(self, head: str) -> Sequence[int]:
        try:
            shape = self._distributions[head].required_logits_shape(self.action_space.spaces[head])
        except ConfigError as error:
            raise ConfigError(f"Action head `{head}`: {error}") from error
        return tuple(int(size) for size in shape)

    def _require_head(self, head: str, where: str) -> None:
        if head not in self._distributions:
            raise unknown_key_error(where, head, self._distributions)


def _entries(config: Any) -> list[Any]:
    if config is None:
        return []
    if isinstance(config, Mapping):
        return list(config.values())
    if isinstance(config, Iterable) and not isinstance(config, str):
        return list(config)
    raise ConfigError(f"{_CONFIG}: expected a list of entries, found {config!r}.")


def _space_type(value: Any, where: str) -> type[Any]:
    """Return a space type, also by name: `gym.spaces.Box`, `gymnasium.spaces.Box` and `Box` are the same."""
    if isinstance(value, str) and ("." not in value or value.split(".")[0] in ("gym", "gymnasium", "spaces")):
        value = f"gymnasium.spaces.{value.rpartition('.')[2]}"
    return Factory(spaces.Space).type_from_name(value, config_path=where)


def _distribution_type(value: Any, where: str) -> type[Any]:
    factory = Factory(ProbabilityDistribution)  # type: ignore[type-abstract]  # the configuration names a concrete one
    found = factory.type_from_name(value, config_path=where)
    if not hasattr(found, "required_logits_shape"):
        raise ConfigError(f"{where}: {found.__name__} has no classmethod `required_logits_shape`.")
    return found
