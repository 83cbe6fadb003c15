"""gymnasium's vector environments as vectorised simulations."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import types
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from maze.core.annotations import override
from maze.core.env import space_values
from maze.core.env.batched_core_env import BatchedCoreEnv
from maze.core.env.batched_maze_env import BatchedMazeEnv
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.utils.safe_pickle import safe_load
from maze.core.wrappers import gym_adapters

# Types of attributes that are equal in all vector environments of a kind.
_CONSTANTS = (gymnasium.spaces.Space, EnvSpec, Enum, type, types.ModuleType, types.FunctionType, types.MethodType)


class GymBatch(BatchedCoreEnv):
    """A vector environment of gymnasium as a vectorised simulation, without a loop over its members.

    When an episode ends, the next one begins in the same call, depending on `metadata["autoreset_mode"]`:

    * `SAME_STEP`: the vector environment resets the member; the last observation is in `info["final_obs"]`.
    * `DISABLED`: those members are reset, with `options={"reset_mask": ...}`.
    * `NEXT_STEP`: the autoreset is pending until the next call, in which the action of the member is ignored. Meanwhile
      the member is in `autoreset_pending`, its observation is that at the beginning of its first episode, and the call
      is neither counted nor learned from.

    If the episodes of all members end together, all of them are reset in any mode but `SAME_STEP`.

    Members have no seeds of their own: the seed of the first one seeds all of them.

    :param env: The vector environment.
    :param action_mask: Name of the mask of valid actions, `[n_envs, n_actions]`, in `info` (or of a method); it
        becomes the observation `action_mask`.
    :param reset_options: Options of every reset.
    :raises ConfigError: Its autoreset mode is unknown, or it has unsupported spaces.
    """

    seeds_rows = False

    def __init__(
        self, env: Any, action_mask: str | None = None, reset_options: Mapping[str, Any] | None = None
    ) -> None:
        self.env: VectorEnv[Any, Any, Any] = env
        mode = env.metadata.get("autoreset_mode")
        try:
            self.mode = AutoresetMode(mode)
        except ValueError as error:
            raise ConfigError(
                f"env: {env}: expected metadata['autoreset_mode'] to be one of {list(AutoresetMode)}, found {mode!r}."
            ) from error
        self._action_kind, self._action_leaves = space_values.action_leaves(env.single_action_space)
        self._kind, self._leaves = space_values.observation_leaves(
            env.single_observation_space, type(env.unwrapped).__name__
        )
        seen = {key: leaf.space for key, leaf in self._leaves.items()}
        if action_mask is not None:
            seen[gym_adapters.ACTION_MASK] = gymnasium.spaces.Box(0, 1, (int(env.single_action_space.n),), np.int8)
        actions = gymnasium.spaces.Dict({key: leaf.space for key, leaf in self._action_leaves.items()})
        super().__init__(env.num_envs, {0: actions}, {0: gymnasium.spaces.Dict(seen)})
        self._mask = action_mask
        self._options = dict(reset_options or {})
        self._specs = space_values.dict_specs(self.observation_spaces[0], "observation")
        # Key and cast of the only observation, if it is not a dictionary.
        self._only = None
        if self._kind is None and action_mask is None:
            self._only = next((key, leaf.cast) for key, leaf in self._leaves.items())
        self._shown = {key: np.zeros((self.n_envs, *shape), dtype) for key, (shape, dtype) in self._specs.items()}
        # Whether the arrays of `_shown` are not shared with the vector environment.
        self._is_own = True
        # Observations of members with a pending autoreset.
        self._first: dict[str, np.ndarray] = {}
        # First observations of the episodes that the vector environment has begun, `[n_ended, ...]`.
        self._after: dict[str, np.ndarray] | None = None
        self._next_seed: int | None = None

    def __repr__(self) -> str:
        return str(self.env)

    @property
    def elapsed(self) -> np.ndarray:
        """Steps of the running episodes, `[n_envs]`; computed on request."""
        return np.asarray(np.maximum(self._n_steps - self._begun, 0))

    @elapsed.setter
    def elapsed(self, elapsed: np.ndarray) -> None:
        self._n_steps = 0
        # Step before the first one of each member's episode; later than the current one during a pending autoreset.
        self._begun = -elapsed

    @override(BatchedCoreEnv)
    def begin(self, rows: np.ndarray) -> None:
        self.reset_rows(rows)
        self._begun[rows] = self._n_steps + (self.autoreset_pending is not None)

    @override(BatchedCoreEnv)
    def advance(self, actions: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rewards, terminated, truncated = self.step(actions)
        self.autoreset_pending = None
        self._n_steps += 1
        return rewards, terminated, self.cut_off(truncated, terminated)

    @override(BatchedCoreEnv)
    def step(self, actions: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        given = {key: leaf.batch_to_gym(actions[key]) for key, leaf in self._action_leaves.items()}
        seen, rewards, terminated, truncated, info = self.env.step(space_values.packed(self._action_kind, given))
        if not type(rewards) is type(terminated) is type(truncated) is np.ndarray:
            rewards, terminated, truncated = np.asarray(rewards), np.asarray(terminated), np.asarray(truncated)
        if not rewards.shape == terminated.shape == truncated.shape == self._begun.shape:
            raise EnvironmentContractError(
                f"{self.env}: expected rewards, terminations and truncations of the shape {self._begun.shape}, one "
                f"for each member, found {rewards.shape}, {terminated.shape} and {truncated.shape}."
            )
        self._is_own = False
        if self.mode is not AutoresetMode.SAME_STEP:
            self._shown = self._read(seen, info, terminated | truncated if self._mask else None)
        else:
            self._shown = self._read(seen, info, None)
            if len(rows := (terminated | truncated).nonzero()[0]):
                self._show_final(rows, info)
        return rewards, terminated, truncated

    @override(BatchedCoreEnv)
    def reset_rows(self, rows: np.ndarray) -> None:
        after, self._after = self._after, None
        is_everyone = len(rows) == self.n_envs
        if after is not None and not (is_everyone and self._next_seed is not None):
            self._show_rows(rows, after)
        elif is_everyone:
            self._reset_all()
        elif self.mode is AutoresetMode.DISABLED:
            mask = np.zeros(self.n_envs, np.bool_)
            mask[rows] = True
            seen, info = self.env.reset(options={**self._options, "reset_mask": mask})
            self._show_rows(rows, {key: array[rows] for key, array in self._read(seen, info, ~mask).items()})
        else:
            self.autoreset_pending = rows

    @override(BatchedCoreEnv)
    def observe(self, out: Mapping[str, np.ndarray]) -> None:
        for key, array in self._shown.items():
            out[key][...] = array
        if self.autoreset_pending is not None:
            for key, array in self._first.items():
                out[key][self.autoreset_pending] = array[self.autoreset_pending]

    @override(BatchedCoreEnv)
    def arrays(self) -> dict[str, np.ndarray]:
        self._make_own()
        if self.autoreset_pending is not None:
            for key, array in self._first.items():
                self._shown[key][self.autoreset_pending] = array[self.autoreset_pending]
        return self._shown

    @override(BatchedCoreEnv)
    def seed_row(self, row: int, seed: int) -> None:
        if row == 0:
            self._next_seed = int(seed) % 2**31

    @override(BatchedCoreEnv)
    def close(self) -> None:
        self.env.close()

    @override(BatchedCoreEnv)
    def why_not_kept(self) -> str | None:
        return None if _keeps_itself(self.env) else _obstacle_to_storing(self.env)

    @override(BatchedCoreEnv)
    def row_state(self, row: int) -> dict[str, Any]:
        state: dict[str, Any] = {
            "arrays": {name: np.array(array[row]) for name, array in self.arrays().items()},
            "first": {name: np.array(array[row]) for name, array in self._first.items()},
            "elapsed": int(self.elapsed[row]),
            "pausing": self.autoreset_pending is not None and row in self.autoreset_pending,
        }
        if row == 0:
            env: Any = self.env.unwrapped
            if _keeps_itself(self.env):
                state["simulator"] = env.state_dict()
            else:  # pickled together, because layers may share objects
                state["simulator"] = pickle.dumps([_kept(layer) for layer in _layers(self.env)])
        return state

    @override(BatchedCoreEnv)
    def load_row_state(self, row: int, state: Mapping[str, Any]) -> None:
        if row == 0:
            # Reset first: some vector environments create attributes at the first reset.
            self._reset_all()
            env: Any = self.env.unwrapped
            if _keeps_itself(self.env):
                env.load_state_dict(state["simulator"])
            else:
                stored = safe_load(io.BytesIO(state["simulator"]))
                for layer, attributes in zip(_layers(self.env), stored, strict=True):
                    for name, value in attributes.items():
                        setattr(layer, name, value)
        self._show_rows(np.array([row]), {name: value[None] for name, value in state["arrays"].items()})
        for name, value in state["first"].items():
            self._first[name][row] = value
        self._begun[row] = self._n_steps - state["elapsed"]
        if state["pausing"]:
            self.autoreset_pending = np.append(
                np.zeros(0, np.int64) if self.autoreset_pending is None else self.autoreset_pending, row
            )
            self._begun[row] = self._n_steps + 1

    def _reset_all(self) -> None:
        seed, self._next_seed, self.autoreset_pending = self._next_seed, None, None
        seen, info = self.env.reset(seed=seed, options=dict(self._options) or None)
        self._shown, self._is_own = self._read(seen, info, None), False
        for key, (shape, _) in self._specs.items():
            if self._shown[key].shape != (self.n_envs, *shape):
                raise EnvironmentContractError(
                    f"{self.env}: expected `{key}` {(self.n_envs, *shape)}, found {self._shown[key].shape}."
                )
        if self.mode is AutoresetMode.NEXT_STEP:
            self._first = {key: np.array(array) for key, array in self._shown.items()}

    def _read(self, seen: Any, info: Mapping[str, Any], is_maskless: np.ndarray | None) -> dict[str, np.ndarray]:
        """Return the observations of all members.

        :param is_maskless: Members that need no mask; `None`: none.
        """
        if self._only is not None:
            key, cast = self._only
            return {key: cast(seen)}
        arrays = space_values.unpacked(self._kind, self._leaves, seen)
        if self._mask is not None:
            arrays[gym_adapters.ACTION_MASK] = self._read_mask(info, is_maskless)
        return arrays

    def _read_mask(self, info: Mapping[str, Any], is_maskless: np.ndarray | None) -> np.ndarray:
        assert self._mask is not None
        reported: Any = gym_adapters.reported_mask(self.env, info, self._mask)
        is_reported = np.asarray(info.get(f"_{self._mask}", [reported is not None] * self.n_envs))
        needed = np.ones(self.n_envs, np.bool_) if is_maskless is None else ~is_maskless
        if (needed & ~is_reported).any():
            raise EnvironmentContractError(
                f"{self.env}: the mask of valid actions `{self._mask}` is missing for the members "
                f"{np.flatnonzero(needed & ~is_reported).tolist()}; `info`: {sorted(info)}. Set env.action_mask=false."
            )
        mask = np.ones((self.n_envs, *self._specs[gym_adapters.ACTION_MASK][0]), np.int8)
        if reported is not None:
            mask[is_reported] = np.asarray(reported)[is_reported]
        return mask

    def _show_final(self, rows: np.ndarray, info: Mapping[str, Any]) -> None:
        """Show the last observations of episodes that ended; the next ones have begun already."""
        final, is_there = info.get("final_obs"), info.get("_final_obs")
        if final is None or (is_there is not None and not is_there[rows].all()):
            raise EnvironmentContractError(
                f"{self.env}: ends of members {rows.tolist()} are expected in info['final_obs'], found {sorted(info)}."
            )
        self._after = {key: array[rows] for key, array in self._shown.items()}
        if isinstance(final, np.ndarray) and final.dtype == object:
            each = [space_values.unpacked(self._kind, self._leaves, final[row]) for row in rows]
            arrays = {key: np.stack([one[key] for one in each]) for key in self._leaves}
        else:
            arrays = {key: array[rows] for key, array in space_values.unpacked(self._kind, self._leaves, final).items()}
        if self._mask is not None:
            arrays[gym_adapters.ACTION_MASK] = self._read_mask(
                info.get("final_info", {}), np.ones(self.n_envs, np.bool_)
            )[rows]
        self._show_rows(rows, arrays)

    def _show_rows(self, rows: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        self._make_own()
        for key, array in arrays.items():
            self._shown[key][rows] = array

    def _make_own(self) -> None:
        if not self._is_own:
            self._shown, self._is_own = {key: array.copy() for key, array in self._shown.items()}, True


class GymVectorMazeEnv(BatchedMazeEnv):
    """A member of a gymnasium vector environment as a Maze environment; training steps all members at once.

    :param make: Makes the vector environment; its argument `num_envs` is the number of members.
    :param num_envs: Number of members during training if `runner.concurrency` is not set; `None`: the default.
    """

    def __init__(self, make: Callable[..., Any], num_envs: int | None = None) -> None:
        super().__init__(functools.partial(_batch_of, make))
        self.num_envs = num_envs


def _batch_of(make: Callable[..., Any], n_envs: int) -> GymBatch:
    env = make(num_envs=n_envs)
    if not isinstance(env, VectorEnv) or env.num_envs != n_envs:
        raise ConfigError(f"env: expected a vector environment with {n_envs} members (`num_envs`); {make} made {env}.")
    return GymBatch(env, _mask_name(env))


def _mask_name(env: Any) -> str | None:
    """Return the name of the mask of valid actions in `info` or of its method; `None`: there is no such mask."""
    if not isinstance(env.single_action_space, gymnasium.spaces.Discrete) or gym_adapters.ACTION_MASK in getattr(
        env.single_observation_space, "spaces", ()
    ):
        return None
    info = env.reset(seed=0)[1]
    shape = (env.num_envs, int(env.single_action_space.n))
    return next(
        (name for name in gym_adapters.MASK_NAMES if np.shape(gym_adapters.reported_mask(env, info, name)) == shape),
        None,
    )


def maker_of(env: Any) -> Callable[..., Any]:
    """Return a function that makes vector environments like a given one, for any number of members (`num_envs`).

    :param env: A vector environment made by `gymnasium.make_vec`.
    :raises ConfigError: It was not made by `gymnasium.make_vec`, or is wrapped.
    """
    if isinstance(env, VectorWrapper) or env.spec is None:
        raise ConfigError(
            f"env: {env} is wrapped or was not made by `gymnasium.make_vec`, so that it cannot be made again. "
            "Expected a class or function with the argument `num_envs`, such as env=lambda num_envs: ..."
        )
    spec = copy.copy(env.spec)
    spec.kwargs = {key: value for key, value in spec.kwargs.items() if key != "num_envs"}
    return functools.partial(gymnasium.make_vec, spec)


def batch_of_registered(env: gymnasium.Env[Any, Any], n_envs: int) -> GymBatch:
    """Return the vector environment that is registered for a single one (its `vector_entry_point`).

    :param env: The single environment.
    :param n_envs: Number of members.
    :raises ConfigError: There is none, or the single one has wrappers that are not available for it.
    """
    spec = getattr(env, "spec", None)
    if spec is None or spec.vector_entry_point is None:
        raise ConfigError(
            "runner.placement=batched: expected a vectorised simulation (BatchedMazeEnv, or one that is registered in "
            f"gymnasium with a `vector_entry_point`), found {env}; use runner.placement=in_process or processes."
        )
    given = {wrapper.name: wrapper.kwargs or {} for wrapper in spec.additional_wrappers}
    action_mask = given.pop(gym_adapters.InfoActionMask.__name__, {}).get("name")
    reset_options = given.pop(gym_adapters.ResetOptions.__name__, {}).get("options")
    if given:
        raise ConfigError(
            f"runner.placement=batched: {', '.join(given)} of `{spec.id}` wrap single environments; remove them."
        )
    spec = copy.copy(spec)
    spec.additional_wrappers = ()
    made = gymnasium.make_vec(spec, num_envs=n_envs, vectorization_mode="vector_entry_point")
    return GymBatch(made, action_mask, reset_options)


# -- state of vector environments ------------------------------------------------------------------------------------


def _keeps_itself(env: Any) -> bool:
    """Return whether it has the methods `state_dict` and `load_state_dict`."""
    return hasattr(env.unwrapped, "state_dict") and hasattr(env.unwrapped, "load_state_dict")


def _layers(env: Any) -> list[Any]:
    """Return the wrappers, outermost first, and the vector environment."""
    layers = [env]
    while isinstance(layers[-1], VectorWrapper):
        layers.append(layers[-1].env)
    return layers


def _kept(layer: Any) -> dict[str, Any]:
    """Return the attributes that may change."""
    constant = ("metadata", "_metadata", "env") if isinstance(layer, VectorWrapper) else ("metadata",)
    return {
        name: value for name, value in vars(layer).items() if name not in constant and not isinstance(value, _CONSTANTS)
    }


def _obstacle_to_storing(env: Any) -> str | None:
    """Return why the attributes of all layers do not hold the complete state; `None`: they do."""
    found: list[tuple[str, np.ndarray]] = []
    for layer in _layers(env):
        for name, value in _kept(layer).items():
            place = f"attribute `{name}` of {type(layer).__name__}"
            try:
                safe_load(io.BytesIO(pickle.dumps(value)))
            except Exception as error:  # pickling runs code of the object, which may raise anything
                return (
                    f"{place} is a {type(value).__name__} that cannot be stored, and there are no methods `state_dict` "
                    f"and `load_state_dict` ({error})"
                )
            for array in _arrays_in(value):
                for other_place, other in found:
                    if array is not other and np.may_share_memory(array, other):
                        return f"{place} and {other_place} share their content"
                found.append((place, array))
    return None


def _arrays_in(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, list | tuple | dict):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _arrays_in(entry)
