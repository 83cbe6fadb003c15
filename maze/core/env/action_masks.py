"""Masks of actions among the observations of an environment."""

from __future__ import annotations

from collections.abc import Mapping

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
