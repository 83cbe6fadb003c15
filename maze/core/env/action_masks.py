"""Masks of actions among the observations of an environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

MASK_SUFFIX = "mask"
"""How the names of masks end."""
CANDIDATES_SUFFIX = "candidates"
"""How the names of observations end that hold what an action head chooses among."""


def masked_heads(
    observation_shapes: Mapping[str, tuple[int, ...]], action_space: spaces.Dict, masks: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return masks with the `Discrete` action heads that they are for.

    An observation whose name ends with `mask` is the mask of the one head that has as many choices; where several have,
    `<head>_mask` is that of its head. `<head>_candidates_mask` marks which choices exist, not which are allowed.

    :param observation_shapes: Shapes of the observations of a sub-step.
    :param action_space: Its action heads.
    :param masks: Which head each mask is for, where names and sizes are ambiguous.
    :return: Heads by mask, and masks that might be for several heads.
    """
    heads = {key: int(space.n) for key, space in action_space.spaces.items() if isinstance(space, spaces.Discrete)}
    found: dict[str, str] = {}
    ambiguous: list[str] = []
    of_candidates = {f"{head}_{CANDIDATES_SUFFIX}_{MASK_SUFFIX}" for head in heads}
    for key, shape in observation_shapes.items():
        if key in masks:
            if masks[key] in heads:
                found[key] = masks[key]
        elif key.endswith(MASK_SUFFIX) and len(shape) == 1 and key not in of_candidates:
            fitting = [head for head, n in heads.items() if shape == (n,)]
            fitting = [head for head in fitting if key == f"{head}_{MASK_SUFFIX}"] or fitting
            if len(fitting) == 1:
                found[key] = fitting[0]
            elif fitting:
                ambiguous.append(key)
    return found, ambiguous


def masks_by_name(observation_shapes: Mapping[str, tuple[int, ...]], action_space: spaces.Dict) -> dict[str, str]:
    """Return the masks that the names of heads determine: `<head>_mask`, or `action_mask` if there is one head.

    A mask has an entry for each logit: of `MultiDiscrete` heads the values of one choice after those of another, of
    `MultiBinary` heads one for each bit, which says whether it may be 1. Stacked time steps may come first.

    :param observation_shapes: Shapes of the observations of a sub-step.
    :param action_space: Its action heads.
    :return: Masks by head.
    """
    found: dict[str, str] = {}
    for head, space in action_space.spaces.items():
        for name in (f"{head}_{MASK_SUFFIX}", *([f"action_{MASK_SUFFIX}"] if len(action_space.spaces) == 1 else [])):
            shape = observation_shapes.get(name, ())
            if head not in found and _mask_shape(space) in (shape, shape[1:]):
                found[head] = name
    return found


def _mask_shape(space: spaces.Space[Any]) -> tuple[int, ...] | None:
    """Return the shape of the mask of an action head, one entry per logit; `None`: it cannot be masked."""
    if isinstance(space, spaces.Discrete):
        return (int(space.n),)
    if isinstance(space, spaces.MultiDiscrete):
        return (int(space.nvec.sum()),)
    return tuple(space.shape) if isinstance(space, spaces.MultiBinary) else None


def masks_of_heads(
    observation: Mapping[str, Any], action_space: spaces.Dict, masks: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the mask of each head that can be masked and has one, see :func:`masked_heads` and :func:`masks_by_name`.

    :param observation: An observation of a sub-step.
    :param action_space: Its action heads.
    :param masks: Which head each mask is for, where names and sizes are ambiguous.
    """
    shapes, given = {key: np.shape(value) for key, value in observation.items()}, masks or {}
    by_size = {head: mask for mask, head in masked_heads(shapes, action_space, given)[0].items()}
    named = masks_by_name(shapes, action_space) | {head: mask for mask, head in given.items() if mask in shapes}
    several = (spaces.MultiDiscrete, spaces.MultiBinary)
    return by_size | {head: named[head] for head in named if isinstance(action_space.spaces.get(head), several)}


def allowed_values(space: spaces.Space[Any], mask: Any = None) -> list[np.ndarray]:
    """Return the values of each choice of a discrete head that a mask allows.

    :param space: `Discrete`, with a single choice, `MultiDiscrete` or `MultiBinary`.
    :param mask: The mask; `None`: none. A choice of which it allows nothing may have any value.
    :return: The values `[n_values]` of each choice; of a bit that must not be 1 only 0.
    """
    if isinstance(space, spaces.MultiBinary):
        bits = np.ones(space.shape) if mask is None else np.asarray(mask)
        return [np.arange(1 + bit) for bit in bits.reshape(-1, *space.shape)[-1].ravel() > 0]
    sizes = np.ravel(space.nvec if isinstance(space, spaces.MultiDiscrete) else space.n)  # type: ignore[attr-defined]
    starts = np.ravel(space.start)  # type: ignore[attr-defined]
    valid = np.ones(sizes.sum()) if mask is None else np.asarray(mask)
    choices = np.split(valid.reshape(-1, sizes.sum())[-1] > 0, np.cumsum(sizes)[:-1])
    return [start + np.flatnonzero(each | ~each.any()) for start, each in zip(starts, choices, strict=True)]


def drawn_value(space: spaces.Space[Any], mask: Any, draw: Callable[[int], Any]) -> Any:
    """Return a value of a discrete head that its mask allows.

    :param space: The head.
    :param mask: Its mask.
    :param draw: Returns a random index below a number.
    """
    values = [each[draw(len(each))] for each in allowed_values(space, mask)]
    return np.asarray(values, space.dtype).reshape(space.shape or ())[()]
