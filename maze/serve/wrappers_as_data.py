"""Conversions and wrappers of an environment as operations of :mod:`maze.serve.pipeline`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, RecordEpisodeStatistics, TimeLimit

from maze.core.env.action_conversion import ActionBounds
from maze.core.env.maze_env import MazeEnv
from maze.core.env.space_values import DiscreteAction, DoubleBoxAction, Leaf, MultiDiscreteAction
from maze.core.utils.array_conversions import described
from maze.core.utils.factory import TARGET_KEY, CollectionOfConfigType
from maze.core.wrappers import gym_adapters
from maze.core.wrappers.discretize_actions_wrapper import DiscretizeActionsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymActionConversion, GymObservationConversion
from maze.core.wrappers.observation_normalization.observation_normalization_wrapper import (
    ObservationNormalizationWrapper,
)
from maze.core.wrappers.observation_preprocessing.preprocessing_wrapper import PreProcessingWrapper
from maze.core.wrappers.observation_stack_wrapper import ObservationStackWrapper
from maze.core.wrappers.random_reset_wrapper import StepSkipWrapper
from maze.core.wrappers.split_actions_wrapper import SplitActionsWrapper
from maze.core.wrappers.wrapper import ActionWrapper, ObservationWrapper, Wrapper
from maze.core.wrappers.wrapper_factory import WrapperFactory
from maze.serve.pipeline import StepKey

Operation = dict[str, Any]
_HARMLESS_GYM_WRAPPERS = (
    OrderEnforcing,
    PassiveEnvChecker,
    RecordEpisodeStatistics,
    gym_adapters.ResetOptions,
    TimeLimit,
    gym_adapters.WeighedReward,
)


@dataclass
class Operations:
    """Operations between the raw environment and the policy.

    :param environment: The raw environment: the innermost one, or the outermost wrapper that is not data, such as one
        that splits a step into sub-steps.
    :param chain: The wrappers around it, innermost first.
    :param observations: Operations by sub-step, from the raw environment to the network.
    :param actions: Operations by sub-step, from the network to the raw environment.
    :param wrappers: All wrappers, innermost first, with their form in the bundle.
    :param code: Code that the bundle cannot contain, with the name by which a session accepts it.
    """

    environment: Any
    chain: list[Wrapper[Any]]
    observations: dict[StepKey, list[Operation]]
    actions: dict[StepKey, list[Operation]]
    wrappers: list[dict[str, str]] = field(default_factory=list)
    code: list[dict[str, Any]] = field(default_factory=list)

    def size(self) -> int:
        """Return the number of operations."""
        return sum(map(len, (*self.observations.values(), *self.actions.values())))

    def add_code(self, name: str, code: Any, call: str | None, is_required: bool) -> str:
        """List code that the bundle cannot contain.

        :param name: Its name.
        :param code: An object of its class.
        :param call: Signature of the caller's function; None: no function can replace it.
        :param is_required: Whether the policy cannot act without it.
        :return: A unique name.
        """
        names = [piece["name"] for piece in self.code]
        unique = name if name not in names else f"{name}#{sum(each.split('#')[0] == name for each in names) + 1}"
        self.code.append({"name": unique, "class": _path(code), "call": call, "is_required": is_required})
        return unique


def wrappers_of(env: MazeEnv[Any]) -> tuple[list[Wrapper[Any]], MazeEnv[Any]]:
    """Return the wrappers of an environment, innermost first, and the environment inside."""
    chain: list[Wrapper[Any]] = []
    inner: Any = env
    while not issubclass(type(inner), MazeEnv):
        chain.insert(0, inner)
        inner = inner.env
    return chain, inner


def operations_of(env: MazeEnv[Any]) -> Operations:
    """Describe the observations and actions of an environment and its wrappers as operations.

    :param env: The environment, wrapped as in training.
    """
    chain, base = wrappers_of(env)
    own = [index for index, wrapper in enumerate(chain) if _is_opaque(type(wrapper))]
    if own:
        return _around_own_code(chain[: own[-1] + 1], chain[own[-1] + 1 :])
    keys = list(base.observation_spaces_dict)
    operations = Operations(base, chain, {key: [] for key in keys}, {key: [] for key in keys})
    for key in keys:
        operations.observations[key].append(_entries(base, key, operations))
        last: list[Operation] = [_pack(base, key, operations)]
        bounds = {name: list(limits) for name, limits in ActionBounds(base.action_spaces_dict[key]).by_head.items()}
        operations.actions[key] += [{"op": "clip", "bounds": bounds}, *last] if bounds else last
    # wrappers of gymnasium that change observations or actions belong to the raw environment
    inner: Any = getattr(base.core_env, "env", None)
    while isinstance(inner, gymnasium.Wrapper):
        if not isinstance(inner, (*_HARMLESS_GYM_WRAPPERS, gymnasium.RewardWrapper)):
            operations.add_code(f"gymnasium.{type(inner).__name__}", inner, None, is_required=False)
        inner = inner.env
    _add_all(chain, operations)
    return operations


def _is_opaque(kind: type[Wrapper[Any]]) -> bool:
    """Return whether the effect on observations and actions is unknown; it may even change sub-steps."""
    is_one_way = issubclass(kind, (ObservationWrapper, ActionWrapper))
    return kind not in _WRAPPERS and not is_one_way and not kind.keeps_observations_and_actions


def wrappers_of_environment(wrappers: CollectionOfConfigType, with_own: bool = True) -> list[dict[str, Any]]:
    """Return the wrappers of a run that its bundle does not contain: they change rewards, limit steps, record.

    :param wrappers: Configurations, innermost first.
    :param with_own: Include wrappers of unknown effect, with all wrappers inside of them.
    """
    entries = WrapperFactory.configured(wrappers)
    own = [index for index, (kind, _) in enumerate(entries) if _is_opaque(kind)]
    n_inner = own[-1] + 1 if own and with_own else 0
    return [
        {TARGET_KEY: f"{kind.__module__}.{kind.__qualname__}", **arguments}
        for index, (kind, arguments) in enumerate(entries)
        if index < n_inner or (kind.keeps_observations_and_actions and kind not in _WRAPPERS)
    ]


def _around_own_code(inner: list[Wrapper[Any]], chain: list[Wrapper[Any]]) -> Operations:
    """Return operations around a wrapper of unknown effect, the last of the inner ones, as the environment."""
    outermost: Any = inner[-1]
    keys = list(outermost.observation_spaces_dict)
    operations = Operations(outermost, chain, {key: [] for key in keys}, {key: [] for key in keys})
    name = operations.add_code(type(outermost).__name__, outermost, None, is_required=False)
    operations.wrappers += [{"class": _path(wrapper), "kept_as": "code of the caller"} for wrapper in inner]
    for key in keys:
        operations.observations[key].append({"op": "entries", "kind": "converted", "code": name})
        operations.actions[key].append({"op": "pack", "kind": "converted", "code": name})
    _add_all(chain, operations)
    return operations


def _add_all(chain: list[Wrapper[Any]], operations: Operations) -> None:
    for wrapper in chain:
        n_code, n_operations = len(operations.code), operations.size()
        add = _WRAPPERS.get(type(wrapper))
        if add is not None:
            add(wrapper, operations)
        elif issubclass(type(wrapper), StepSkipWrapper):
            operations.add_code(type(wrapper).__name__, wrapper, None, is_required=True)
        elif not wrapper.keeps_observations_and_actions:
            _add_unknown(wrapper, operations)
        what = "data" if operations.size() > n_operations else "left out"
        what = "code of the caller" if len(operations.code) > n_code else what
        operations.wrappers.append({"class": _path(wrapper), "kept_as": what})


def _path(code: Any) -> str:
    return f"{type(code).__module__}.{type(code).__qualname__}"


def _entries(base: MazeEnv[Any], key: StepKey, operations: Operations) -> Operation:
    conversion = base.observation_conversion_dict[key]
    if type(conversion) is GymObservationConversion:
        return {"op": "entries", "kind": _KINDS[conversion.kind]}
    call = "function(state) -> entries of the observation space"
    name = operations.add_code(f"observation_conversion.{key}", conversion, call, is_required=False)
    return {"op": "entries", "kind": "converted", "code": name}


def _pack(base: MazeEnv[Any], key: StepKey, operations: Operations) -> Operation:
    conversion = base.action_conversion_dict[key]
    if type(conversion) is GymActionConversion and not conversion.prefix:
        leaves = {name: _leaf(leaf) for name, leaf in conversion.leaves.items()}
        return {"op": "pack", "kind": _KINDS[conversion.kind], "entries": leaves}
    call = "function(entries of the action space, state) -> action of the simulation"
    name = operations.add_code(f"action_conversion.{key}", conversion, call, is_required=False)
    return {"op": "pack", "kind": "converted", "code": name}


_KINDS: Mapping[type | None, str] = {None: "single", dict: "dict", tuple: "tuple"}


def _leaf(leaf: Leaf) -> dict[str, Any]:
    dtype = str(leaf.gym_dtype)
    if isinstance(leaf, DiscreteAction):
        return {"kind": "discrete", "start": leaf.start}
    if isinstance(leaf, MultiDiscreteAction):
        return {"kind": "multi_discrete", "dtype": dtype, "start": leaf.start}
    if isinstance(leaf, DoubleBoxAction):
        return {"kind": "box", "dtype": dtype, "low": leaf.low, "high": leaf.high}
    return {"kind": "cast", "dtype": dtype}


# -- wrappers ---------------------------------------------------------------------------------------------------------


def _add_unknown(wrapper: Wrapper[Any], operations: Operations) -> None:
    """Add a custom wrapper of observations or actions."""
    name = type(wrapper).__name__
    if issubclass(type(wrapper), ObservationWrapper):
        call = "function(entries, actor_id) -> entries"
        code = operations.add_code(f"{name}.observation", wrapper, call, is_required=True)
        for stages in operations.observations.values():
            stages.append({"op": "code", "code": code})
    else:
        call = "function(action, actor_id) -> action"
        code = operations.add_code(f"{name}.action", wrapper, call, is_required=True)
        for stages in operations.actions.values():
            stages.insert(0, {"op": "code", "code": code})


def _add_stack(wrapper: ObservationStackWrapper, operations: Operations) -> None:
    for key, stacks in wrapper.stacks.items():
        operations.observations[key] += [{"op": "stack", **each._asdict(), "dtype": str(each.dtype)} for each in stacks]


def _add_preprocessing(wrapper: PreProcessingWrapper, operations: Operations) -> None:
    for key, stages in wrapper.stages.items():
        for stage, (name, processor) in zip(stages, wrapper.preprocessors[key], strict=True):
            operations.observations[key].append(
                {
                    "op": "convert",
                    "source": name,
                    "target": stage.target,
                    "keeps_original": stage.keeps_original,
                    **_conversion(processor, "process", stage.target, operations),
                }
            )


def _add_normalization(wrapper: ObservationNormalizationWrapper, operations: Operations) -> None:
    wrapper.get_statistics()  # raises an error early if they are missing
    parts = {name: _conversion(each, "normalize_value", name, operations) for name, each in wrapper.strategies.items()}
    for key, space in wrapper.env.observation_spaces_dict.items():
        operations.observations[key] += [
            {"op": "convert", "source": name, "target": name, "keeps_original": False, **parts[name]}
            for name in space.spaces
            if name in parts
        ]


def _conversion(owner: Any, method: str, name: str, operations: Operations) -> Operation:
    """Return the conversion of a pre-processor or a strategy, unless a subclass overrides its method."""
    kind = type(owner)
    own = next((each for each in kind.__mro__ if method in vars(each)), kind)
    describing = next((each for each in kind.__mro__ if "conversion" in vars(each)), None)
    conversion = owner.conversion() if describing is not None and issubclass(describing, own) else None
    if conversion is not None:
        return {"conversion": described(conversion)}
    call = "function(array) -> array"
    return {"code": operations.add_code(f"{kind.__name__}.{name}", owner, call, is_required=True)}


def _add_grid(wrapper: DiscretizeActionsWrapper, operations: Operations) -> None:
    for key, space in wrapper.action_spaces_dict.items():
        for name, grid in wrapper.grids.items():
            if name in space.spaces:
                operation = {"op": "grid", "name": name, "shape": list(grid.shape), "dtype": str(grid.dtype)}
                operations.actions[key].insert(0, {**operation, "values": grid.values})


def _add_split(wrapper: SplitActionsWrapper, operations: Operations) -> None:
    for key, space in wrapper.action_spaces_dict.items():
        for name, split in wrapper.splits.items():
            if split.indices.keys() <= space.spaces.keys():
                operation = {"op": "split", "name": name, "shape": list(split.shape), "dtype": str(split.dtype)}
                operations.actions[key].insert(0, {**operation, "indices": dict(split.indices)})


def _add_skip(wrapper: StepSkipWrapper, operations: Operations) -> None:
    env: Any = wrapper.env
    for key in operations.observations:
        operations.observations[key].append({"op": "skip", "n_steps": wrapper.n_steps})
        idle = None if wrapper.skip_mode == "sticky" else dict(env.action_conversion_dict[key].noop_action())
        idle = None if idle is None else {name: np.asarray(value) for name, value in idle.items()}
        operations.actions[key].insert(0, {"op": "skip", "idle": idle})


_WRAPPERS: Mapping[type[Any], Any] = {
    ObservationStackWrapper: _add_stack,
    PreProcessingWrapper: _add_preprocessing,
    ObservationNormalizationWrapper: _add_normalization,
    DiscretizeActionsWrapper: _add_grid,
    SplitActionsWrapper: _add_split,
    StepSkipWrapper: _add_skip,
}


def space_as_data(space: gymnasium.spaces.Space[Any]) -> dict[str, Any]:
    """Return a space as JSON. Infinite bounds are null; bounds that are the same everywhere are one number.

    :param space: A `Box`, `Discrete`, `MultiDiscrete` or `MultiBinary`.
    """
    data: dict[str, Any] = {"type": type(space).__name__, "shape": list(space.shape or ()), "dtype": str(space.dtype)}
    if isinstance(space, gymnasium.spaces.Box):
        data |= {"low": _bound(space.low, np.min), "high": _bound(space.high, np.max)}
    elif isinstance(space, gymnasium.spaces.Discrete):
        data |= {"n": int(space.n), "start": int(space.start)}
    elif isinstance(space, gymnasium.spaces.MultiDiscrete):
        data |= {"nvec": space.nvec.tolist(), "start": np.asarray(space.start).tolist()}
    return data


_MOST_BOUNDS = 256


def _bound(bound: np.ndarray, outermost: Any) -> Any:
    """Return bounds in JSON; many different ones are replaced by the outermost."""
    value = outermost(bound) if bound.size > _MOST_BOUNDS or len(set(bound.flat)) == 1 else bound
    finite = np.where(np.isfinite(value), value, None)  # type: ignore[arg-type]  # an array of objects
    return np.asarray(finite).tolist()
