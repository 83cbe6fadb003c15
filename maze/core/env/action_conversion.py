"""Actions of the agent: their conversion to those of the simulation, their values, bounds and masks."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_state import MazeStateType


class ActionConversionInterface(ABC):
    """Convert between actions of an agent (elements of a dictionary space) and actions of the simulation."""

    uses_state: ClassVar[bool] = True
    """Whether `space_to_maze`, as defined in the same class, uses the state. `False` saves the creation of a state
    before every action; `maze_state` is `None` then."""

    @abstractmethod
    def space_to_maze(self, action: dict[str, np.ndarray], maze_state: MazeStateType) -> MazeActionType:
        """Convert an agent's action.

        :param action: Element of :meth:`space`, with entries `[*space.shape]`.
        :param maze_state: State in which the action is taken; `None` if :attr:`uses_state` is false.
        :return: Action of the simulation.
        """

    def maze_to_space(self, maze_action: MazeActionType) -> dict[str, np.ndarray]:
        """Convert an action of the simulation to one of the agent; needed to train on recorded trajectories.

        :param maze_action: Action of the simulation.
        :return: Element of :meth:`space`, with entries `[*space.shape]`.
        :raises NotImplementedError: The conversion has no inverse.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.maze_to_space, the inverse of space_to_maze, is needed for recorded actions."
        )

    @abstractmethod
    def space(self) -> spaces.Dict:
        """Return the agent's action space."""

    def noop_action(self) -> Any:
        """Return an action of the agent that has no effect.

        :raises NotImplementedError: There is none.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no noop action; implement `noop_action`.")


def uses_state(conversion: ActionConversionInterface) -> bool:
    """Return whether a conversion uses the state.

    :param conversion: The conversion. The class that defines its `space_to_maze` decides, by its own attribute
        `uses_state`; without one, it uses the state.
    """
    owner = next(each for each in type(conversion).__mro__ if "space_to_maze" in vars(each))
    return bool(vars(owner).get("uses_state", True))


class DictActionConversion(ActionConversionInterface):
    """Pass actions on unchanged, entries of `Discrete` spaces as integers.

    For simulations whose actions are dictionaries.

    :param heads: Spaces of the entries, the action heads.
    """

    uses_state = False

    def __init__(self, heads: Mapping[str, spaces.Space[Any]]) -> None:
        self._space = heads if isinstance(heads, spaces.Dict) else spaces.Dict(dict(heads))

    @override(ActionConversionInterface)
    def space_to_maze(self, action: dict[str, np.ndarray], maze_state: MazeStateType) -> dict[str, Any]:
        return {
            key: int(action[key]) if isinstance(space, spaces.Discrete) else action[key]
            for key, space in self._space.items()
        }

    @override(ActionConversionInterface)
    def maze_to_space(self, maze_action: dict[str, Any]) -> dict[str, Any]:
        return {key: maze_action[key] for key in self._space}

    @override(ActionConversionInterface)
    def space(self) -> spaces.Dict:
        return self._space


# -- values of action spaces -------------------------------------------------------------------------------------------


def action_problem(action: Any, space: spaces.Space[Any]) -> str | None:
    """Return why an action is not an element of its space; `None`: it is one.

    :param action: The action; arrays of one number are accepted as numbers.
    :param space: The action space of the actor.
    """
    if not isinstance(space, spaces.Dict):
        return _entry_problem(action, space)
    if not isinstance(action, Mapping) or not {*space} <= {*action}:
        return f"an action must be a dictionary with the keys {list(space)}, found {action!r}"
    problems = ((key, _entry_problem(action[key], entry)) for key, entry in space.items())
    return next((f"action `{key}`: {problem}" for key, problem in problems if problem is not None), None)


def _entry_problem(value: Any, space: spaces.Space[Any]) -> str | None:
    if isinstance(space, spaces.Dict):
        return action_problem(value, space)
    candidate = value
    with contextlib.suppress(TypeError, ValueError):
        if np.can_cast((array := np.asarray(value)).dtype, space.dtype, "same_kind"):  # type: ignore[arg-type]
            candidate = array.astype(space.dtype).reshape(space.shape or ())
            candidate = candidate[()] if space.shape == () else candidate
    return None if space.contains(candidate) else f"expected an element of {space}, found {value!r}"


_minimum, _maximum = np.minimum, np.maximum  # once per environment step: attribute lookups are measurable


class ActionBounds:
    """Clipping of actions to the bounded `Box` heads of an action space.

    Unbounded distributions sample actions beyond the bounds. Log-probabilities are those of the sampled action; the
    environment and replay buffers receive the clipped action.

    :param space: An action space; one that is not a dictionary has no heads to clip.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        heads = space.spaces if isinstance(space, spaces.Dict) else {}
        self.by_head = {
            head: (entry.low, entry.high)
            for head, entry in heads.items()
            if isinstance(entry, spaces.Box) and bool(entry.bounded_below.any() or entry.bounded_above.any())
        }
        self._items = tuple(self.by_head.items())

    def __bool__(self) -> bool:
        """Return whether there are bounded heads."""
        return bool(self.by_head)

    def clip(self, action: Any) -> Any:
        """Return a copy of the action with its heads clipped. NaN stays NaN, to be reported.

        :param action: A dictionary. Other objects, and heads of a wrong shape, are not clipped.
        """
        if not isinstance(action, dict):
            return action
        clipped = action.copy()
        for head, bounds in self._items:
            value = action.get(head)
            if value is None:
                continue
            low, high = bounds
            if value.__class__ is not np.ndarray or value.shape != low.shape:
                value = np.asarray(value)
                if value.size != low.size:
                    continue
                low, high = low.reshape(value.shape), high.reshape(value.shape)
            clipped[head] = _minimum(_maximum(value, low), high)
        return clipped

    def clip_rows(self, head: str, values: np.ndarray) -> np.ndarray:
        """Return clipped values of one head.

        :param head: The head, bounded or not.
        :param values: `[..., *shape]`, which are returned themselves if the head has no bounds.
        """
        bounds = self.by_head.get(head)
        return values if bounds is None else _minimum(_maximum(values, bounds[0]), bounds[1])


# -- masks of actions among the observations --------------------------------------------------------------------------

MASK_SUFFIX = "mask"
"""Suffix of the names of masks."""


CANDIDATES_SUFFIX = "candidates"
"""Suffix of the names of observations with the candidates of an action head."""


def masked_heads(
    observation_shapes: Mapping[str, tuple[int, ...]], action_space: spaces.Dict, masks: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return masks with the `Discrete` action heads that they are for.

    An observation whose name ends with `mask` is the mask of the one head that has as many choices; where several have,
    `<head>_mask` is that of its head. `<head>_candidates_mask` marks which choices exist, not which are allowed.

    :param observation_shapes: Shapes of the observations of a sub-step.
    :param action_space: Its action heads.
    :param masks: Action head by the name of its mask, where names and sizes are ambiguous.
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
    `MultiBinary` heads one for each bit, whether it may be 1. Stacked time steps may come first.

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
    :param masks: Action head by the name of its mask, where names and sizes are ambiguous.
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
