"""Values of gymnasium spaces: their arrays, checks, bounds and masks."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import EnvironmentContractError

SpacesDict = Mapping[StepKeyType, spaces.Dict]
Arrays = dict[StepKeyType, dict[str, np.ndarray]]
"""Step key -> observation or action key -> array."""

ndarray = np.ndarray

ArraySpec = tuple[tuple[int, ...], np.dtype[Any]]


def array_specs(spaces_dict: SpacesDict, kind: str) -> dict[StepKeyType, dict[str, ArraySpec]]:
    """Return shapes and dtypes for all step keys, in the spaces' own key order.

    :param spaces_dict: Spaces by step key.
    :param kind: `observation` or `action`, for error messages.
    """
    return {step_key: dict_specs(space, kind, f" of sub-step {step_key!r}") for step_key, space in spaces_dict.items()}


def dict_specs(space: spaces.Dict, kind: str = "entry", place: str = "") -> dict[str, ArraySpec]:
    """Return shapes and dtypes for all keys of a sub-step's spaces, in their order.

    :param space: The sub-step's spaces.
    :param kind: `observation` or `action`, for error messages.
    :param place: Environment and sub-step, for error messages.
    :raises EnvironmentContractError: Values have no fixed numeric shape.
    """
    specs = {}
    for key, sub in space.items():
        if sub.shape is None or sub.dtype is None or np.dtype(sub.dtype).kind not in "biuf":
            raise EnvironmentContractError(
                f"{kind} `{key}`{place}: {type(sub).__name__} spaces have no fixed numeric shape; expected Box, "
                "Discrete, MultiDiscrete or MultiBinary. Convert it in the conversion or with a wrapper."
            )
        specs[key] = tuple(sub.shape), np.dtype(sub.dtype)
    return specs


def usual_values(space: spaces.Dict) -> dict[str, np.ndarray]:
    """Return small values of a sub-step's spaces: ones where the space has ones, so that masks allow all actions."""
    values = {}
    for key, (shape, dtype) in dict_specs(space).items():
        entry, ones = space[key], np.ones(shape, dtype)
        if isinstance(entry, spaces.Box):
            values[key] = np.clip(ones, entry.low, entry.high)
        else:  # Discrete and MultiDiscrete begin with `start`
            values[key] = ones * np.asarray(getattr(entry, "start", 1), dtype)
    return values


class Cast:
    """Convert the values of one space entry to its dtype.

    Floating-point dtypes accept any number. Integer and boolean dtypes accept a value of another dtype only if it is
    represented exactly: NumPy itself would store 300 as 44 in `uint8`, and 0.7 as 0.

    >>> Cast(np.dtype(np.uint8), "observation `image`")(np.array([7.0]))
    array([7], dtype=uint8)

    :param dtype: The dtype of the space.
    :param place: Environment and key, for messages.
    """

    def __init__(self, dtype: np.dtype[Any], place: str) -> None:
        self.dtype = dtype
        self._place = place

    def __call__(self, value: Any) -> np.ndarray:
        """Return the value as an array of the dtype; an array of this dtype is not copied.

        :param value: A number or array.
        :raises EnvironmentContractError: The dtype does not represent it exactly.
        """
        # NumPy has one object for each native dtype: comparing identities takes a sixth of the time of `==`.
        if value.__class__ is ndarray and value.dtype is self.dtype:
            return value
        array = np.asarray(value)
        if array.dtype == self.dtype:
            return array
        is_same = np.zeros(array.shape, np.bool_)
        try:
            with np.errstate(invalid="ignore"):
                converted = array.astype(self.dtype)
            is_same = np.asarray(self.dtype.kind == "f" or converted == array)
            if is_same.all():
                return converted
        except (TypeError, ValueError, OverflowError):  # no numbers, or too large
            pass
        raise EnvironmentContractError(
            f"{self._place}: expected values of dtype {self.dtype}, as the space declares, found "
            f"{array[~is_same].flat[0]!r} in an array of dtype {array.dtype}. Correct them, or the space."
        )


def zeros(spaces_dict: SpacesDict, leading: tuple[int, ...], kind: str) -> Arrays:
    """Return arrays `[*leading, ...]` for all values of the spaces.

    :param spaces_dict: Spaces by step key.
    :param leading: Leading dimensions.
    :param kind: `observation` or `action`, for error messages.
    """
    return {
        step_key: {key: np.zeros((*leading, *shape), dtype) for key, (shape, dtype) in specs.items()}
        for step_key, specs in array_specs(spaces_dict, kind).items()
    }


def copy_rows(source: Arrays, target: Mapping[StepKeyType, Mapping[str, np.ndarray]], actors: list[ActorID]) -> None:
    """Copy each environment's current observation between two sets of arrays `[n_envs, ...]`.

    :param source: Arrays by step key and observation key.
    :param target: The same structure.
    :param actors: Next actor by environment, which determines the arrays of its row.
    """
    step_keys = {actor.step_key for actor in actors}
    for step_key in step_keys:
        rows: Any = slice(None)
        if len(step_keys) > 1:
            rows = [index for index, actor in enumerate(actors) if actor.step_key == step_key]
        for key, array in source[step_key].items():
            target[step_key][key][rows] = array[rows]


def action_column(
    actions: Mapping[str, Any], step_key: StepKeyType, key: str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> np.ndarray:
    """Return one key of the actions of a sub-step, as a copy.

    :param actions: Arrays `[n_envs, ...]` by action key.
    :param step_key: The sub-step, for error messages.
    :param key: The action key.
    :param shape: Its expected shape, environments included.
    :param dtype: Its type in the action space.
    :raises EnvironmentContractError: The key is missing, or its values do not have that shape and type.
    """
    try:
        column = np.array(actions[key], dtype)
    except (KeyError, TypeError, ValueError) as error:
        raise EnvironmentContractError(
            f"actions of sub-step {step_key!r}, action `{key}`: expected numbers ({dtype}), found {[*actions]}: {error}"
        ) from error
    if column.shape != shape:
        raise EnvironmentContractError(
            f"actions of sub-step {step_key!r}, action `{key}`: expected the shape {shape}, found {column.shape}."
        )
    return column


def check_observation(
    observation: Any, actor: ActorID, specs: Mapping[StepKeyType, Mapping[str, ArraySpec]], env_index: int
) -> None:
    """Check an observation against its space.

    :param observation: The observation.
    :param actor: Its actor.
    :param specs: Shapes and dtypes by step key and observation key.
    :param env_index: Index of the environment.
    :raises EnvironmentContractError: It does not fit; the message names environment, sub-step and key.
    """
    place = f"environment {env_index}, sub-step {actor.step_key!r}"
    expected = specs.get(actor.step_key)
    if expected is None:
        raise EnvironmentContractError(
            f"{place}: actor_id() returned a sub-step without an observation space. Known: {list(specs)}."
        )
    check_entries(observation, expected, place)


def check_entries(
    observation: Any, expected: Mapping[str, tuple[tuple[int, ...] | None, np.dtype[Any] | None]], place: str
) -> None:
    """Check the keys, shapes and dtypes of an observation.

    :param observation: The observation.
    :param expected: Shapes and dtypes by key; `None`: not of arrays.
    :param place: Environment and sub-step, for the message.
    :raises EnvironmentContractError: It does not fit.
    """
    if not isinstance(observation, Mapping) or set(observation) != set(expected):
        found = list(observation) if isinstance(observation, Mapping) else type(observation).__name__
        raise EnvironmentContractError(
            f"{place}: expected an observation with the keys {list(expected)}, found {found}."
        )
    for key, (shape, dtype) in expected.items():
        if shape is None or dtype is None:
            continue
        value = np.asarray(observation[key])
        if value.shape != shape or not np.can_cast(value.dtype, dtype, "same_kind"):
            raise EnvironmentContractError(
                f"{place}, observation `{key}`: expected shape {shape} and dtype {dtype} as in its space, found "
                f"shape {value.shape} and dtype {value.dtype}."
            )


def as_pieces(array: np.ndarray) -> np.ndarray:
    """Return rows as single void elements, `[n]`, which are copied faster; a view if possible.

    :param array: `[n, ...]`
    """
    size = array.dtype.itemsize * math.prod(array.shape[1:])
    return np.ascontiguousarray(array).reshape(-1).view(np.dtype((np.void, size)))


def put_rows(target: np.ndarray, rows: np.ndarray, source: np.ndarray, pieces: np.ndarray) -> None:
    """Copy rows: `target[rows] = source[rows]`.

    :param target: `[n, ...]`
    :param rows: Indices, `[n_rows]`.
    :param source: Of the same shape and type.
    :param pieces: Result of :func:`as_pieces` for the source.
    """
    if target.flags.c_contiguous and target.size:
        target.reshape(-1).view(pieces.dtype)[rows] = pieces[rows]
    else:
        target[rows] = source[rows]


def split_rows(columns: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return a dictionary with views of the arrays `[n_rows, ...]` for each row."""
    if len(columns) == 1:
        ((key, column),) = columns.items()
        return [{key: row} for row in column]
    return [dict(zip(columns, rows, strict=True)) for rows in zip(*columns.values(), strict=True)]


def check_in_space(observation: Any, space: spaces.Space[Any], env_name: str, step_key: StepKeyType) -> None:
    """Raise an error if an observation does not fit its space; warn if only its values are out of range.

    :param observation: Result of a conversion.
    :param space: Its space.
    :param env_name: Environment, for messages.
    :param step_key: Sub-step, for messages.
    """
    if not isinstance(space, spaces.Dict):
        return
    place = f"{env_name}, sub-step {step_key!r}"
    check_entries(observation, {key: (entry.shape, entry.dtype) for key, entry in space.items()}, place)
    for key, entry in space.items():
        array = np.asarray(observation[key])
        if entry.shape is not None and entry.dtype is not None and not entry.contains(array.astype(entry.dtype)):
            warnings.warn(
                f"{place}, observation `{key}`: values from {array.min()} to {array.max()} are not all in the space "
                f"{entry}.",
                UserWarning,
                stacklevel=5,
            )


def rows_outside(values: np.ndarray, space: spaces.Space[Any]) -> np.ndarray:
    """Return which rows are no values of a space, apart from the bounds of boxes: not finite, or no choice, `[n]`.

    :param values: `[n, *space.shape]`.
    :param space: Their space.
    """
    outside = ~np.isfinite(values) if values.dtype.kind == "f" else np.zeros(values.shape, np.bool_)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        choices = values - getattr(space, "start", 0)
        outside |= (choices < 0) | (choices >= getattr(space, "n" if isinstance(space, spaces.Discrete) else "nvec", 2))
    return np.asarray(outside.reshape(len(values), -1).any(1))


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
        :param values: `[..., *shape]`
        """
        bounds = self.by_head.get(head)
        return values if bounds is None else _minimum(_maximum(values, bounds[0]), bounds[1])


# -- masks of actions among the observations --------------------------------------------------------------------------

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
