"""Operations of a bundle between the raw environment and the network: wrappers and conversions as data.

Operations are mappings. Those of observations lead from the raw environment to the network:

* `entries`: the first one; unpacks an observation, and checks types and choices of its entries;
* `convert`: an array conversion of one entry; `stack`: the latest values of an entry; `skip`: actions are repeated for
  several steps;
* `code`: a function that the caller provides.

Those of actions lead from the network's heads to the raw environment: `skip`, `grid`, `split`, `code`,
`clip`, and `pack` as the last.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

import numpy as np

from maze.core.errors import EnvironmentContractError, NonFiniteError, did_you_mean
from maze.core.utils.array_conversions import Stack, conversion_of
from maze.serve.bundle_file import Array, BundleError

Entries = dict[str, Any]
StepKey = Union[str, int]
Actor = tuple[StepKey, int]
Provided = Mapping[str, Callable[..., Any]]


@dataclass
class EpisodeState:
    """State of the operations in an episode, for one environment.

    :param first_actor: First actor of a step, where actions are repeated.
    :param n_repeated: Steps since the last decision.
    :param states: Hidden states `[size]` of the actors' networks by state key.
    """

    stacks: dict[tuple[Actor, str], Array] = field(default_factory=dict)
    first_actor: Actor | None = None
    n_repeated: int = 0
    is_repeating: bool = False
    last_actions: dict[Actor, Entries] = field(default_factory=dict)
    states: dict[Actor, dict[str, Array]] = field(default_factory=dict)


Stage = Callable[[Any, EpisodeState, Actor], Any]
"""From entries to entries, possibly the same modified object; an observation stage returns None where the last action
is repeated."""


def stages_of(kinds: Mapping[str, Any], operations: Sequence[Mapping[str, Any]], provided: Provided) -> list[Stage]:
    """Build the stages of a sub-step's observations or actions, in their order.

    :param kinds: :data:`OBSERVATION_STAGES` or :data:`ACTION_STAGES`.
    :param operations: The operations.
    :param provided: Code of the caller.
    """
    stages = []
    for operation in operations:
        try:
            stages.append(kinds[operation["op"]](operation, provided))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:  # noqa: PERF203
            raise BundleError(f"An operation of the bundle cannot be read: {operation!r:.300} ({error!r}).") from error
    return stages


def needed_code(code: Sequence[Mapping[str, Any]], provided: Provided) -> Provided:
    """Return the part of the provided code that a policy needs, one of several policies.

    :param code: Pieces of code as a bundle's card lists them.
    :param provided: Code of the caller for all policies.
    """
    named = {str(piece["name"]) for piece in code}
    return {name: function for name, function in provided.items() if name in named}


def check_provided(code: Sequence[Mapping[str, Any]], provided: Provided) -> None:
    """Compare the code that a policy needs with the provided code.

    :param code: Pieces of code as a bundle's card lists them.
    :param provided: The caller's functions by the names of the pieces.
    :raises BundleError: A required piece is missing, or a provided one is unknown.
    """
    known = [str(piece["name"]) for piece in code if piece.get("call")]
    for name in provided:
        if name not in known:
            names = ", ".join(known) or "nothing"
            hint = did_you_mean(name, known)
            raise BundleError(f"provided[{name!r}]: the bundle needs no such code.{hint} It needs: {names}.")
    for piece in code:
        if piece.get("is_required") and piece["name"] not in provided:
            raise BundleError(
                f"The policy was trained with code that the bundle cannot hold: {piece['class']}. Provide it as "
                f"session(provided={{{piece['name']!r}: function}}), {piece['call']}; or call act_batch with "
                "network inputs."
            )


def packed(entries: Mapping[str, Any], kind: str) -> Any:
    """Return entries as the raw environment packs them.

    :param entries: Entries of an observation or an action.
    :param kind: `single`, `dict`, `tuple`, or `converted`.
    """
    if kind == "single":
        return next(iter(entries.values()))
    return tuple(entries.values()) if kind == "tuple" else entries


def choices_of(space: Mapping[str, Any]) -> tuple[Array, Array] | None:
    """Return the first and the last choice of a discrete space; None: it is a box.

    :param space: The space as JSON.
    """
    if space["type"] == "Box":
        return None
    first = np.asarray(space.get("start", 0))
    last = first + np.asarray(space.get("n", space.get("nvec", 2))) - 1
    np.broadcast_shapes(last.shape, tuple(space["shape"]))
    return first, last


def typed_entry(
    value: Any, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], choices: tuple[Array, Array] | None = None
) -> Array:
    """Convert an entry of an observation to an array of its space.

    :raises EnvironmentContractError: It has another shape, or other numbers than the space.
    :raises NonFiniteError: It is NaN or infinite.
    """
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise EnvironmentContractError(f"Observation `{name}`: expected numbers of shape {shape}: {error}.") from error
    if array.shape != shape:
        found = array.shape if array.dtype.kind in "biuf" else f"{value!r:.200}"
        raise EnvironmentContractError(f"Observation `{name}`: expected numbers of shape {shape}, found {found}.")
    if array.dtype != dtype:
        if array.dtype.kind not in "biuf":
            raise EnvironmentContractError(f"Observation `{name}`: expected numbers, found {array.dtype}.")
        with np.errstate(all="ignore"):
            typed = array.astype(dtype)
        if dtype.kind != "f" and not (typed == array).all():
            raise EnvironmentContractError(f"Observation `{name}`: expected values of {dtype}, found {array!r:.200}.")
        array = typed
    if dtype.kind == "f" and not -np.inf < np.add.reduce(array, None) < np.inf and not np.isfinite(array).all():
        raise NonFiniteError(f"Observation `{name}` is not finite: {array!r:.200}.")
    if choices is not None and ((array < choices[0]) | (array > choices[1])).any():
        expected = f"{choices[0].tolist()} to {choices[1].tolist()}"
        raise EnvironmentContractError(f"Observation `{name}`: expected choices from {expected}, found {array!r:.200}.")
    return array


# -- observations -----------------------------------------------------------------------------------------------------


def _entries(operation: Mapping[str, Any], provided: Provided) -> Stage:
    """Run the first stage: from the observation to checked entries."""
    entries = {
        str(key): (np.dtype(space["dtype"]), tuple(space["shape"]), choices_of(space))
        for key, space in operation["space"].items()
    }
    kind, convert = operation["kind"], provided.get(operation.get("code") or "")
    keys = list(entries)

    def single(observation: Any, state: EpisodeState, actor: Actor) -> Entries:
        return {keys[0]: typed_entry(observation, keys[0], *entries[keys[0]])}

    def several(observation: Any, state: EpisodeState, actor: Actor) -> Entries:
        if convert is not None:
            observation = convert(observation)
        elif kind == "tuple" and isinstance(observation, (tuple, list)) and len(observation) == len(keys):
            observation = dict(zip(keys, observation, strict=True))
        if not isinstance(observation, Mapping) or not all(map(observation.__contains__, keys)):
            found = list(observation) if isinstance(observation, Mapping) else type(observation).__name__
            code = operation.get("code")
            advice = f" To pass states of the simulation, provide their conversion as {code!r}." if code else ""
            raise EnvironmentContractError(
                f"Sub-step {actor[0]!r}: expected as observation a {'tuple' if kind == 'tuple' else 'mapping'} with "
                f"the entries {keys}, found {found!s:.200}.{advice}"
            )
        return {key: typed_entry(observation[key], key, *entry) for key, entry in entries.items()}

    return single if kind == "single" else several


def _convert(operation: Mapping[str, Any], provided: Provided) -> Stage:
    source, target, keeps_original = operation["source"], operation["target"], operation["keeps_original"]
    convert: Any = provided[operation["code"]] if "code" in operation else conversion_of(operation["conversion"])

    def stage(entries: Entries, state: EpisodeState, actor: Actor) -> Entries:
        entries[target] = convert(entries[source] if keeps_original else entries.pop(source))
        return entries

    return stage


def _stack(operation: Mapping[str, Any], provided: Provided) -> Stage:
    arguments = {name: operation[name] for name in ("source", "target", "keeps_original", "is_delta")}
    stack = Stack(**arguments, n_steps=int(operation["n_steps"]), dtype=np.dtype(operation["dtype"]))

    def stage(entries: Entries, state: EpisodeState, actor: Actor) -> Entries:
        stack.add_to(entries, state.stacks, actor)
        return entries

    return stage


def _skip(operation: Mapping[str, Any], provided: Provided) -> Stage:
    n_steps = int(operation["n_steps"])

    def stage(entries: Entries, state: EpisodeState, actor: Actor) -> Entries | None:
        if actor == state.first_actor:
            state.n_repeated += 1
        if state.first_actor is None or state.n_repeated == n_steps:
            state.first_actor, state.n_repeated = actor, 0
        state.is_repeating = state.n_repeated > 0
        return None if state.is_repeating else entries

    return stage


def _code(operation: Mapping[str, Any], provided: Provided) -> Stage:
    function = provided[operation["code"]]
    return lambda entries, state, actor: function(entries, actor)


# -- actions ----------------------------------------------------------------------------------------------------------


def _repeat(operation: Mapping[str, Any], provided: Provided) -> Stage:
    idle = operation.get("idle")

    def stage(action: Entries | None, state: EpisodeState, actor: Actor) -> Entries:
        if not state.is_repeating:
            assert action is not None, "there is an action unless it is repeated"
            state.last_actions[actor] = action
            return dict(action)
        return dict(state.last_actions[actor] if idle is None else idle)

    return stage


def _grid(operation: Mapping[str, Any], provided: Provided) -> Stage:
    """Replace choices by their values."""
    name, shape, dtype, values = operation["name"], tuple(operation["shape"]), operation["dtype"], operation["values"]

    def stage(action: Entries, state: EpisodeState, actor: Actor) -> Entries:
        choices = np.asarray(action[name]).reshape(-1)
        chosen = [grid[choice] for grid, choice in zip(values, choices, strict=True)]
        return {**action, name: np.array(chosen, dtype).reshape(shape)}

    return stage


def _join(operation: Mapping[str, Any], provided: Provided) -> Stage:
    """Join parts to the vector that they were split from."""
    name, shape, dtype, indices = operation["name"], tuple(operation["shape"]), operation["dtype"], operation["indices"]

    def stage(action: Entries, state: EpisodeState, actor: Actor) -> Entries:
        joined = dict(action)
        vector = joined[name] = np.empty(shape, dtype)
        for part, index in indices.items():
            vector[index] = joined.pop(part)
        return joined

    return stage


def _clip(operation: Mapping[str, Any], provided: Provided) -> Stage:
    """Clip values to the bounds of a box, as a Maze environment does."""
    bounds = operation["bounds"]

    def stage(action: Entries, state: EpisodeState, actor: Actor) -> Entries:
        clipped = dict(action)
        for name, (low, high) in bounds.items():
            clipped[name] = np.minimum(np.maximum(action[name], low), high)
        return clipped

    return stage


def _pack(operation: Mapping[str, Any], provided: Provided) -> Stage:
    """Run the last stage: return the action as the raw environment takes it."""
    kind = operation["kind"]
    convert: Callable[..., Any] = provided.get(operation.get("code") or "", lambda action: action)
    if kind == "converted":
        return lambda action, state, actor: convert(action)
    leaves = {str(key): _LEAVES[leaf["kind"]](leaf) for key, leaf in operation["entries"].items()}

    def stage(action: Entries, state: EpisodeState, actor: Actor) -> Any:
        return packed({key: leaf(action[key]) for key, leaf in leaves.items()}, kind)

    return stage


def _discrete(leaf: Mapping[str, Any]) -> Callable[[Any], Any]:
    start = int(leaf["start"])
    return lambda value: operator.index(value.item() if isinstance(value, np.ndarray) else value) + start


def _multi_discrete(leaf: Mapping[str, Any]) -> Callable[[Any], Any]:
    dtype, start = np.dtype(leaf["dtype"]), leaf["start"]
    return lambda value: np.asarray(value, dtype) + start


def _box(leaf: Mapping[str, Any]) -> Callable[[Any], Any]:
    dtype, low, high = np.dtype(leaf["dtype"]), leaf["low"], leaf["high"]
    return lambda value: np.minimum(np.maximum(np.asarray(value, dtype), low), high)


def _cast(leaf: Mapping[str, Any]) -> Callable[[Any], Any]:
    dtype = np.dtype(leaf["dtype"])
    return lambda value: np.asarray(value, dtype)


_LEAVES = {"discrete": _discrete, "multi_discrete": _multi_discrete, "box": _box, "cast": _cast}
OBSERVATION_STAGES = {"entries": _entries, "convert": _convert, "stack": _stack, "skip": _skip, "code": _code}
ACTION_STAGES = {"skip": _repeat, "grid": _grid, "split": _join, "code": _code, "clip": _clip, "pack": _pack}
