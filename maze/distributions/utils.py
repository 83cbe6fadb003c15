"""Helpers of the distributions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from gymnasium import spaces

from maze.core.errors import ConfigError
from maze.distributions.distribution import ProbabilityDistribution

SpaceType = TypeVar("SpaceType", bound=spaces.Space[Any])


def atanh(x: torch.Tensor) -> torch.Tensor:
    """Return the inverse hyperbolic tangent; arguments are moved inside (-1, 1) by the dtype's precision."""
    limit = 1.0 - torch.finfo(x.dtype).eps
    return torch.atanh(x.clamp(-limit, limit))


def tensor_clamp(x: torch.Tensor, t_min: torch.Tensor, t_max: torch.Tensor) -> torch.Tensor:
    """Clamp element by element to bounds that are tensors themselves.

    :param x: Values of any shape.
    :param t_min: Lower bounds, broadcast to the shape of `x`; the result where the bounds are in the wrong order.
    :param t_max: Upper bounds, broadcast to the shape of `x`.
    """
    return torch.maximum(torch.minimum(x, t_max), t_min)


def require_space(action_space: Any, space_type: type[SpaceType], distribution: type[Any]) -> SpaceType:
    """Refuse spaces that a distribution cannot serve; return the others.

    :param action_space: Space of an action head.
    :param space_type: Type of space that the distribution needs.
    :param distribution: The distribution's class, for messages.
    :raises ConfigError: The space is of another type, a `Box` of integers, or counted from another number than 0.
    """
    if not isinstance(action_space, space_type):
        raise ConfigError(f"{distribution.__name__} needs a {space_type.__name__} space, found {action_space}.")
    if isinstance(action_space, spaces.Box) and not np.issubdtype(action_space.dtype, np.floating):
        raise ConfigError(
            f"{distribution.__name__} draws floating point numbers, but {action_space} holds {action_space.dtype}. "
            "Use a Box of a floating dtype, or Discrete or MultiDiscrete for integers."
        )
    if np.any(np.asarray(getattr(action_space, "start", 0)) != 0):
        raise ConfigError(f"{action_space} does not start at 0; shift it in the environment's action conversion.")
    return action_space


def require_bounds(action_space: spaces.Box, distribution: type[Any]) -> None:
    """Refuse boxes that have no finite width in some component, as networks compute it: in float32.

    :param action_space: Space of an action head.
    :param distribution: The distribution's class, for messages.
    :raises ConfigError: A bound is infinite, or the width of a component is zero, negative or infinite in float32.
    """
    if not action_space.is_bounded():
        raise ConfigError(
            f"{distribution.__name__} needs finite bounds, found {action_space}. Bound the action space, or use "
            "maze.distributions.gaussian.DiagonalGaussianProbabilityDistribution for it."
        )
    with np.errstate(over="ignore"):
        width = np.subtract(action_space.high, action_space.low, dtype=np.float32, casting="same_kind")
    if not ((width > 0.0) & np.isfinite(width)).all():
        raise ConfigError(
            f"{distribution.__name__} needs bounds with low < high, and a width within the range of float32, found "
            f"{action_space}."
        )


def space_bounds(action_space: spaces.Box, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower and upper bounds of a box, on the device and with the dtype of `like`.

    :return: Both of the shape `[*action_space.shape]`.
    """
    low = torch.as_tensor(action_space.low, dtype=like.dtype, device=like.device)
    high = torch.as_tensor(action_space.high, dtype=like.dtype, device=like.device)
    return low, high


def box_logits_shape(action_space: Any, distribution: type[Any], is_bounded: bool = False) -> tuple[int, ...]:
    """Return the shape of two logits for each component of a box, side by side in the last dimension.

    :param action_space: Space of an action head.
    :param distribution: The distribution's class, for messages.
    :param is_bounded: Whether the distribution needs finite bounds.
    :return: The shape without batch dimensions: that of the space with its last dimension doubled; `(2,)` for a scalar.
    :raises ConfigError: The distribution cannot serve the space.
    """
    box = require_space(action_space, spaces.Box, distribution)
    if is_bounded:
        require_bounds(box, distribution)
    shape = box.shape
    return (*shape[:-1], 2 * shape[-1]) if shape else (2,)


def split_box_logits(logits: torch.Tensor, action_space: spaces.Box) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two halves of the logits, each `[..., *action_space.shape]`."""
    first, second = logits.chunk(2, dim=-1)
    return (first, second) if action_space.shape else (first.squeeze(-1), second.squeeze(-1))


@contextmanager
def isolated_global_generator(generator: torch.Generator | None) -> Iterator[None]:
    """Let code that can only draw from torch's global CPU generator draw from `generator` instead.

    The global generator continues afterwards as if nothing had happened. Other threads that draw from it meanwhile draw
    from `generator` too.

    :param generator: Generator on the CPU, which is advanced; `None`: the global one is used and advanced.
    """
    if generator is None:
        yield
        return
    global_state = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.get_rng_state())
        torch.set_rng_state(global_state)


def sample_with(distribution: ProbabilityDistribution, generator: torch.Generator | None) -> Any:
    """Draw from any distribution with the given generator, also where its `sample` knows no generators.

    Those are evaluated in :func:`isolated_global_generator`, which has an effect on the CPU only.

    :param distribution: The distribution.
    :param generator: Generator on the device of the distribution; `None`: torch's global generator.
    :return: The result of `distribution.sample`.
    """
    if generator is None:
        return distribution.sample()
    if _takes_generator(type(distribution)):
        return distribution.sample(generator=generator)  # type: ignore[call-arg]  # `sample` of the interface takes none
    with isolated_global_generator(generator):
        return distribution.sample()


@lru_cache(maxsize=256)
def _takes_generator(distribution_type: type[Any]) -> bool:
    return "generator" in inspect.signature(distribution_type.sample).parameters
