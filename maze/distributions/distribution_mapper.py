"""Which distribution belongs to which action head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from gymnasium import spaces

from maze.core.errors import ConfigError, unknown_key_error
from maze.core.utils.factory import Factory
from maze.distributions import multi_categorical
from maze.distributions.bernoulli import BernoulliProbabilityDistribution
from maze.distributions.beta import BetaProbabilityDistribution
from maze.distributions.categorical import CategoricalProbabilityDistribution, GreedyCategoricalProbabilityDistribution
from maze.distributions.dict import DictProbabilityDistribution
from maze.distributions.distribution import ProbabilityDistribution
from maze.distributions.gaussian import DiagonalGaussianProbabilityDistribution
from maze.distributions.numpy_distributions import HeadDescription
from maze.distributions.squashed_gaussian import SquashedGaussianProbabilityDistribution

# Name of the sampler, and whether it always samples the greedy action.
_DESCRIBED: Mapping[type[Any], tuple[str, bool]] = {
    BernoulliProbabilityDistribution: ("bernoulli", False),
    BetaProbabilityDistribution: ("beta", False),
    CategoricalProbabilityDistribution: ("categorical", False),
    DiagonalGaussianProbabilityDistribution: ("gaussian", False),
    GreedyCategoricalProbabilityDistribution: ("categorical", True),
    multi_categorical.GreedyMultiCategoricalProbabilityDistribution: ("multi_categorical", True),
    multi_categorical.MultiCategoricalProbabilityDistribution: ("multi_categorical", False),
    SquashedGaussianProbabilityDistribution: ("squashed_gaussian", False),
}


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
        spaces.MultiDiscrete: multi_categorical.MultiCategoricalProbabilityDistribution,
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
        self._distributions: dict[str, type[Any]] = {}
        for head, space in action_space.spaces.items():
            fitting = [known for space_type, known in self.default_mapping.items() if isinstance(space, space_type)]
            if not fitting:
                raise ConfigError(
                    f"Action head `{head}`: there is no distribution for {space}. Supported are "
                    f"{', '.join(space_type.__name__ for space_type in self.default_mapping)}."
                )
            self._distributions[head] = fitting[0]
        config = distribution_mapper_config or []
        for index, entry in enumerate(config.values() if isinstance(config, Mapping) else config):
            self._apply(entry, f"distribution_mapper_config[{index}]")
        self.action_heads = tuple(self._distributions)
        """Names of all action heads."""
        self._logits_shapes: dict[str, tuple[int, ...]] = {}
        for head, distribution in self._distributions.items():
            try:
                self._logits_shapes[head] = tuple(distribution.required_logits_shape(action_space.spaces[head]))
            except ConfigError as error:  # noqa: PERF203 (for once, and few heads)
                raise ConfigError(f"Action head `{head}`: {error}") from error
        self.candidate_heads: frozenset[str] = frozenset()
        """`Discrete` heads with as many choices as there are candidates, in training or elsewhere."""

    def distribution_class(self, action_head: str) -> type[Any]:
        """Return the distribution's class of an action head.

        :param action_head: Name of the head.
        :raises KeyError: There is no such head.
        """
        return self._distributions[action_head]

    def describe_head(self, action_head: str) -> HeadDescription | None:
        """Return the distribution of an action head as data, for sampling without torch.

        :param action_head: Name of the head.
        :return: The argument of :func:`maze.distributions.numpy_distributions.sampler_of`. `None` where only the
            distribution itself can sample: subclasses of the usual ones, and all others.
        :raises KeyError: There is no such head.
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

    def choice_sizes(self, action_head: str) -> list[int]:
        """Return how the logits of an action head split into categorical choices; empty for other distributions.

        :param action_head: Name of the head.
        :raises KeyError: There is no such head.
        """
        distribution, space = self.distribution_class(action_head), self.action_space.spaces[action_head]
        if issubclass(distribution, CategoricalProbabilityDistribution) and isinstance(space, spaces.Discrete):
            return [int(space.n)]
        is_vector = issubclass(distribution, multi_categorical.MultiCategoricalProbabilityDistribution)
        return space.nvec.flatten().tolist() if is_vector and isinstance(space, spaces.MultiDiscrete) else []

    def required_logits_shape(self, action_head: str) -> Sequence[int]:
        """Return the shape of the logits of an action head, without batch dimensions.

        :param action_head: Name of the head.
        :raises ConfigError: There is no such head.
        """
        if action_head not in self._distributions:
            raise unknown_key_error("action head", action_head, self._distributions)
        return self._logits_shapes[action_head]

    def action_head_distribution(
        self, action_head: str, logits: torch.Tensor, temperature: float
    ) -> ProbabilityDistribution:
        """Return the distribution of one action head.

        :param action_head: Name of the head.
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
        :param temperature: Below 1 sharpens the distributions, above 1 flattens them.
        """
        return DictProbabilityDistribution(
            {head: self.action_head_distribution(head, logits, temperature) for head, logits in logits_dict.items()}
        )

    def _apply(self, entry: Mapping[str, Any], where: str) -> None:
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where}: expected a mapping with `distribution`, found {entry!r}.")
        known = {"action_space", "action_head", "bounded", "distribution"}
        if not set(entry) <= known or "distribution" not in entry or len(entry) < 2:
            raise ConfigError(
                f"{where}: expected `distribution` and `action_space` or `action_head`, perhaps with `bounded`, "
                f"found {sorted(map(str, entry))}."
            )
        factory = Factory(ProbabilityDistribution)  # type: ignore[type-abstract]  # the configuration names a concrete one
        distribution = factory.type_from_name(entry["distribution"], config_path=f"{where}.distribution")
        heads = list(self._distributions)
        if (head := entry.get("action_head")) is not None:
            if head not in heads:
                raise unknown_key_error(f"{where}.action_head", head, heads)
            heads = [head]
        if (name := entry.get("action_space")) is not None:
            # `gym.spaces.Box`, `gymnasium.spaces.Box` and `Box` are the same
            if isinstance(name, str) and ("." not in name or name.split(".")[0] in ("gym", "gymnasium", "spaces")):
                name = f"gymnasium.spaces.{name.rpartition('.')[2]}"
            space_type = Factory(spaces.Space).type_from_name(name, config_path=f"{where}.action_space")
            heads = [head for head in heads if isinstance(self.action_space.spaces[head], space_type)]
        for head in heads:
            space = self.action_space.spaces[head]
            if not entry.get("bounded") or (isinstance(space, spaces.Box) and space.is_bounded()):
                self._distributions[head] = distribution
