"""Making and adapting gymnasium environments: wrappers for their API, spaces and action masks.

Wrappers are applied if an environment needs them, before it becomes a Maze environment.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator, parse_env_id, registry
from gymnasium.spaces.utils import flatdim, flatten, flatten_space
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector.utils import iterate

from maze.core.env.base_env import TRUNCATION_KEY, reset_values
from maze.core.env.space_values import LEAVES
from maze.core.errors import ConfigError, EnvironmentContractError, did_you_mean
from maze.core.utils.factory import TARGET_KEY, Factory, is_module_name, locate, named_module
from maze.core.utils.import_guard import modules_of

ACTION_MASK = "action_mask"
MASK_NAMES = (ACTION_MASK, "action_masks", "valid_action_mask")
"""Names of the entry of `info`, or of the method, that holds the mask of valid actions."""
MAX_ITEMS = 32
"""Default number of items of a sequence that are kept."""

_ENCODED = (*LEAVES, spaces.Sequence)
# Key in the flat dictionary, path to the value, space.
_Part = tuple[str, tuple[Any, ...], "spaces.Space[Any]"]


def adapted(env: Any, drop: Sequence[str] = (), encode: Mapping[str, int] | None = None) -> Any:
    """Convert the spaces of a gymnasium environment to flat dictionaries of arrays, unless they are.

    :param env: The environment.
    :param drop: Observations to leave out.
    :param encode: See :class:`ArrayObservations`.
    :raises ConfigError: It is not an environment of gymnasium.
    """
    if isinstance(env, gymnasium.vector.VectorEnv):
        raise ConfigError(
            f"env: expected a single environment, such as gymnasium.make(...) or its id; found {env}. "
            "RunContext(env=...) and `env._target_` take vector environments, and functions that make them."
        )
    if not isinstance(env, gymnasium.Env):
        if drop or encode:
            raise ConfigError(f"env: `drop` and `encode` need an environment of gymnasium, found {env!r}.")
        return env
    env = in_current_api(env)
    if drop or encode or not _is_flat(env.observation_space):
        env = ArrayObservations(env, list(drop), dict(encode or {}))
    parts = _parts(env.action_space, "action", ())
    has_leaves = all(isinstance(part, LEAVES) for _, _, part in parts)
    return FlatActions(env) if has_leaves and not _is_flat(env.action_space) else env


def in_current_api(env: Any) -> Any:
    """Wrap gymnasium environments whose `reset` takes no seed in :class:`CurrentApi`.

    :param env: Any object; those that are not such an environment are returned unchanged.
    """
    return env if not isinstance(env, gymnasium.Env) or takes_seed(env.unwrapped) else CurrentApi(env)


def takes_seed(env: Any) -> bool:
    """Return whether `reset` takes a seed, as in gymnasium's current API; the older API has a method `seed`."""
    try:
        parameters = inspect.signature(env.reset).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.name == "seed" or p.kind is p.VAR_KEYWORD for p in parameters)


class CurrentApi(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Convert an environment whose `reset` takes no seed to gymnasium's current API, which other wrappers require.

    :param env: Environment whose `reset` returns the observation alone or with an `info`, and `step` four values
        or five.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        RecordConstructorArgs.__init__(self)
        super().__init__(env)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode.

        :param seed: Seed of `np_random` and argument of the environment's method `seed`; `None`: generators continue.
        :param options: Must be empty.
        :return: The first observation and an `info`, empty where the environment returns none.
        :raises EnvironmentContractError: There are options, which the older API does not have.
        """
        if options:
            raise EnvironmentContractError(f"`reset` of {self.unwrapped} takes no options, found {options}.")
        if seed is not None:
            gymnasium.Env.reset(self.unwrapped, seed=seed)  # its generator `np_random`
            if callable(method := getattr(self.unwrapped, "seed", None)):
                method(seed)
        return reset_values(self.env.reset())

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Return five values."""
        return step_values(self.env, self.env.step(action))


class ResetOptions(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Reset an environment with fixed options.

    :param env: The environment.
    :param options: Options of `reset`.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], options: Mapping[str, Any]) -> None:
        RecordConstructorArgs.__init__(self, options=dict(options))
        super().__init__(env)
        self._options = dict(options)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode.

        :param seed: Seed of the environment; `None`: its generators continue.
        :param options: Options that replace fixed ones of the same names.
        :return: The first observation and its `info`.
        """
        return self.env.reset(seed=seed, options={**self._options, **(options or {})})


class WeighedReward(gymnasium.RewardWrapper[Any, Any], RecordConstructorArgs):
    """Convert rewards that consist of several numbers to their weighted sum.

    :param env: The environment.
    :param weights: Weight of each number.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], weights: Sequence[float]) -> None:
        RecordConstructorArgs.__init__(self, weights=list(weights))
        super().__init__(env)
        self._weights = np.asarray(weights, np.float64)

    def reward(self, reward: Any) -> float:
        """Return the weighted sum.

        :param reward: Numbers `[n_weights]`.
        :raises ConfigError: There is not one number for each weight.
        """
        if np.shape(reward) != self._weights.shape:
            raise ConfigError(f"env.reward_weights: expected weights for {reward!r}, found {self._weights.size}.")
        return float(self._weights @ reward)


class ArrayObservations(gymnasium.ObservationWrapper[Any, Any, Any], RecordConstructorArgs):
    """Convert observations to a flat dictionary of arrays.

    Keys of nested containers are joined by `_`. A sequence becomes an array `[n, features]` and a mask `<key>_mask` of
    its items; items beyond `n` are dropped. Texts are left out, unless they are encoded as the numbers of their
    characters, and so are other spaces.

    :param env: The environment.
    :param drop: Observations to leave out.
    :param encode: Number of characters or items to keep of a text or sequence.
    :raises ConfigError: An entry to drop or encode does not exist, no entry is left, or two get the same name.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], drop: Sequence[str], encode: Mapping[str, int]) -> None:
        RecordConstructorArgs.__init__(self, drop=list(drop), encode=dict(encode))
        super().__init__(env)
        parts = list(_parts(env.observation_space, "observation", (), is_outermost=True))
        known = [key for key, _, _ in parts]
        for name, keys in (("drop", drop), ("encode", encode)):
            for key in keys:
                if not any(other == key or other.startswith(f"{key}_") for other in known):
                    raise ConfigError(
                        f"env.{name}: no observation `{key}`.{did_you_mean(key, known)} Known: {', '.join(known)}."
                    )
        self._encoded: list[tuple[str, tuple[Any, ...], spaces.Space[Any], int]] = []
        entries: dict[str, spaces.Space[Any]] = {}
        left_out: list[str] = []
        for key, path, space in parts:
            if any(key == dropped or key.startswith(f"{dropped}_") for dropped in drop):
                continue
            if not isinstance(space, _ENCODED) and not (isinstance(space, spaces.Text) and key in encode):
                left_out.append(key)
                continue
            n = encode.get(key, MAX_ITEMS)
            self._encoded.append((key, path, space, n))
            encoded = _encoded_spaces(key, space, n)
            if twice := [other for other in encoded if other in entries]:
                raise ConfigError(f"env: two observations are called `{twice[0]}` when they are flattened; drop one.")
            entries |= encoded
        if left_out:
            names = ", ".join(left_out)
            warnings.warn(
                f"Observations that are not numbers are left out: {names}. env.drop=[{names}] suppresses this warning; "
                "env.encode={<text>: <n>} keeps the first n characters of a text.",
                UserWarning,
                stacklevel=4,
            )
        if not entries:
            raise ConfigError("env: no observation is left, all are dropped. Remove entries of `env.drop`.")
        self.observation_space = spaces.Dict(entries)

    def observation(self, observation: Any) -> dict[str, Any]:
        """Return the entries of the flat dictionary.

        :param observation: A nested observation, which is not modified.
        """
        entries: dict[str, Any] = {}
        for key, path, space, n in self._encoded:
            value = observation
            for step in path:
                value = value[step]
            entries |= _encoded(key, space, n, value)
        return entries


class FlatActions(gymnasium.ActionWrapper[Any, Any, Any], RecordConstructorArgs):
    """Convert actions from a flat dictionary to nested ones; keys are joined by `_`.

    :param env: Environment with an action space of nested dictionaries and tuples.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        RecordConstructorArgs.__init__(self)
        super().__init__(env)
        parts = list(_parts(env.action_space, "action", (), is_outermost=True))
        self._key_of = {path: key for key, path, _ in parts}
        self.action_space = spaces.Dict({key: space for key, _, space in parts})

    def action(self, action: Mapping[str, Any]) -> Any:
        """Return the nested action."""
        return self._nested(self.env.action_space, (), action)

    def _nested(self, space: spaces.Space[Any], path: tuple[Any, ...], action: Mapping[str, Any]) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: self._nested(part, (*path, key), action) for key, part in space.spaces.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(self._nested(part, (*path, i), action) for i, part in enumerate(space.spaces))
        return action[self._key_of[path]]


class InfoActionMask(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Add the mask of valid actions, from `info` or a method, as an observation.

    :param env: Environment with one discrete action.
    :param name: Key in `info`, or name of a method without arguments.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], name: str = ACTION_MASK) -> None:
        RecordConstructorArgs.__init__(self, name=name)
        super().__init__(env)
        assert isinstance(env.action_space, spaces.Discrete)
        self._n_actions = int(env.action_space.n)
        shown = env.observation_space.spaces if isinstance(env.observation_space, spaces.Dict) else None
        self._name = name
        self._is_dict = shown is not None
        shown = dict(shown) if shown is not None else {"observation": env.observation_space}
        self.observation_space = spaces.Dict({**shown, ACTION_MASK: spaces.Box(0, 1, (self._n_actions,), np.int8)})

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Return the first observation with its mask."""
        observation, info = reset_values(self.env.reset(**kwargs))
        return self._with_mask(observation, info, is_over=False), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step.

        :param action: Index of the action.
        :return: Observation with its mask, reward, terminated, truncated and info. Where the environment reports no
            mask after the last step of an episode, that mask allows all actions.
        :raises EnvironmentContractError: The environment reports no mask during an episode.
        """
        observation, reward, terminated, truncated, info = step_values(self.env, self.env.step(action))
        shown = self._with_mask(observation, info, is_over=terminated or truncated)
        return shown, reward, terminated, truncated, info

    def _with_mask(self, observation: Any, info: Mapping[str, Any], is_over: bool) -> dict[str, Any]:
        mask = reported_mask(self.env, info, self._name)
        if mask is None and is_over:
            mask = np.ones(self._n_actions, np.int8)
        if mask is None:
            raise EnvironmentContractError(
                f"{gym_env_name(self.env)}: expected the mask of valid actions `{self._name}` with every step; "
                f"found `info` with {sorted(info or ())}. Return it, or set env.action_mask=false."
            )
        shown = observation if self._is_dict else {"observation": observation}
        return {**shown, ACTION_MASK: np.asarray(mask, np.int8)}


def with_action_mask(env: Any, action_mask: bool | str | None = None) -> Any:
    """Return the environment with its mask of valid actions as an observation, see :class:`InfoActionMask`.

    The mask is an entry of `info`, or a method without arguments; the environment is reset once to get `info`.

    :param env: The environment.
    :param action_mask: `None`: show a mask if the environment has one; true: require one; false: show none; a text:
        the name of its entry of `info`, or of the method.
    :raises ConfigError: The required mask is missing.
    """
    if action_mask is False:
        return env
    shown = getattr(getattr(env, "observation_space", None), "spaces", ())
    has_choice = isinstance(env, gymnasium.Env) and isinstance(env.action_space, spaces.Discrete)
    if has_choice and isinstance(env.observation_space, spaces.Space) and ACTION_MASK not in shown:
        info = reset_values(env.reset())[1]
        for name in (action_mask,) if isinstance(action_mask, str) else MASK_NAMES:
            if np.shape(reported_mask(env, info, name)) == (int(env.action_space.n),):
                return InfoActionMask(in_current_api(env), name)
    if action_mask is None or (action_mask is True and ACTION_MASK in shown):
        return env
    raise ConfigError(
        f"env.action_mask={action_mask}: expected a mask of actions of {gym_env_name(env)} in `info` or by a method "
        f"without arguments; found `info` with {sorted(reset_values(env.reset())[1])}."
    )


def reported_mask(env: Any, info: Mapping[str, Any], name: str) -> Any:
    """Return the mask of valid actions.

    :param env: An environment, or a vector environment.
    :param info: `info` of its last observation.
    :param name: Key in `info`, or name of a method without arguments.
    :return: `None`: there is none.
    """
    if info and name in info:
        return info[name]
    method = getattr(env.unwrapped, name, None)
    if not callable(method):
        return None
    try:
        inspect.signature(method).bind()
    except (TypeError, ValueError):  # it needs arguments
        return None
    return method()


# -- parts of spaces -------------------------------------------------------------------------------------------------


def _is_flat(space: Any) -> bool:
    """Return whether a space is a leaf, or a dictionary or tuple of leaves."""
    return not isinstance(space, spaces.Space) or all(
        len(path) < 2 and isinstance(part, LEAVES) for _, path, part in _parts(space, "", ())
    )


def _parts(space: spaces.Space[Any], name: str, path: tuple[Any, ...], is_outermost: bool = False) -> list[_Part]:
    """Return the parts of nested containers, each with its key and the path to its value."""
    inner: list[tuple[str, Any, spaces.Space[Any]]]
    if isinstance(space, spaces.Dict):
        inner = [(key if is_outermost else f"{name}_{key}", key, part) for key, part in space.spaces.items()]
    elif isinstance(space, spaces.Tuple):
        inner = [(f"{name}_{index}", index, part) for index, part in enumerate(space.spaces)]
    else:
        return [(name, path, space)]
    return [found for key, step, part in inner for found in _parts(part, key, (*path, step))]


def _encoded_spaces(key: str, space: spaces.Space[Any], n: int) -> dict[str, spaces.Space[Any]]:
    """Return the spaces of the entries that encode an observation; see :func:`_encoded`."""
    if isinstance(space, spaces.Text):
        return {key: spaces.MultiDiscrete([len(space.characters) + 1] * n)}
    if not isinstance(space, spaces.Sequence):
        return {key: space}
    features: Any = flatten_space(space.feature_space)
    if not isinstance(features, spaces.Box):
        raise ConfigError(f"env: observations of the space {features!r} have no fixed size; drop them by `env.drop`.")
    bounds = np.minimum(features.low, 0), np.maximum(features.high, 0)
    with np.errstate(over="ignore"):  # bounds beyond the range of float32 become infinite
        low, high = (np.tile(bound.astype(np.float32), (n, 1)) for bound in bounds)
    return {key: spaces.Box(low, high, dtype=np.float32), f"{key}_mask": spaces.Box(0, 1, (n,), np.float32)}


def _encoded(key: str, space: spaces.Space[Any], n: int, value: Any) -> dict[str, Any]:
    """Encode an observation: the numbers of `n` characters of a text, or `n` items of a sequence with their mask."""
    if isinstance(space, spaces.Text):
        known, numbers = sorted(space.characters), np.zeros(n, np.int64)
        for index, character in enumerate(str(value)[:n]):
            numbers[index] = known.index(character) + 1
        return {key: numbers}
    if not isinstance(space, spaces.Sequence):
        return {key: value}
    item = space.feature_space
    rows, mask = np.zeros((n, flatdim(item)), np.float32), np.zeros(n, np.float32)
    entries = iterate(space.stacked_feature_space, value) if space.stack else value
    for index, entry in enumerate(itertools.islice(entries, n)):
        rows[index] = flatten(item, entry)  # type: ignore[assignment]  # an array, because its size is fixed
        mask[index] = 1.0
    return {key: rows, f"{key}_mask": mask}


# -- values of `step` -------------------------------------------------------------------------------------------------


def step_values(env: Any, result: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
    """Return the five values of gymnasium's current API, converted from the four of the older one if necessary.

    :param env: The environment, for messages.
    :param result: Result of `step`.
    :raises EnvironmentContractError: It has another number of values.
    """
    n_values = len(result) if isinstance(result, tuple | list) else 1
    if n_values == 5:
        return result  # type: ignore[no-any-return]
    if n_values != 4:
        raise EnvironmentContractError(
            f"{gym_env_name(env)}: expected five values from `step` (observation, reward, terminated, truncated, info) "
            f"or the four of the older API; found {n_values}: {result!r:.200}."
        )
    observation, reward, done, info = result
    truncated = bool(done and info and info.get(TRUNCATION_KEY, False))
    return observation, reward, bool(done) and not truncated, truncated, info


def gym_env_name(env: Any) -> str:
    """Return the name of an environment for messages.

    :param env: An environment of gymnasium or PettingZoo.
    :return: Its id, the name in its metadata, or the name of its class: the first one that it has.
    """
    spec = getattr(env, "spec", None)
    if spec is not None:
        return str(spec.id)
    name = (getattr(env, "metadata", None) or {}).get("name")
    return str(name or type(getattr(env, "unwrapped", env)).__name__)


# -- making of environments ------------------------------------------------------------------------------------------

_GYMNASIUM = re.compile(r"gym(nasium)?\b")


def make_gymnasium_env(name: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """Make the registered environment `name`; for a retired version the current one, with a warning.

    :param name: Id such as `CartPole-v1`, or `module:id` for one that a module registers when it is imported.
    :param kwargs: Passed to `gymnasium.make`, `render_mode` for instance.
    :raises ConfigError: There is no such environment, a package is missing, or it does not take the arguments.
    """
    module, colon, rest = name.partition(":")
    try:
        if (colon and not is_module_name(module)) or ":" in rest:
            raise gymnasium.error.UnregisteredEnv("expected an id, or <module>:<id>.")
        if not colon and newest_version(name) is None and name not in registry:
            _register_from_installed_packages(name)
        if (current := _successor(name)) is not None:
            warnings.warn(f"Environment `{name}` is retired; `{current}` is used instead.", UserWarning, stacklevel=3)
            name = current
        env = gymnasium.make(name, **kwargs)
        if env.spec is None or takes_seed(env.unwrapped):
            return env
        env.close()
        spec = copy.copy(env.spec)
        # applied by the entry point, because the wrappers that `gymnasium.make` adds require the current API
        spec.entry_point = functools.partial(_made_in_current_api, spec.entry_point)
        return gymnasium.make(spec)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        others = [other for other in registry if other != name]
        raise ConfigError(
            f"Environment `{name}` cannot be made: {error}{did_you_mean(name, others)} If another package provides it, "
            f"install that package, and name the module that registers it: env.import=[<module>] or "
            f"env.name=<module>:{rest or name}. Environments of PettingZoo: env=pettingzoo env.name={name}."
        ) from error
    except TypeError as error:
        if "argument" not in str(error) and "gymnasium.Env" not in str(error):  # the entry point returns something else
            raise
        raise ConfigError(
            f"Environment `{name}` cannot be made with the arguments {sorted(kwargs)}: {error}. Environments of the "
            "older package `gym` need gymnasium's compatibility package shimmy."
        ) from error


def made(make: Any, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """Return the environment of a class or of a function.

    :param make: The class or function.
    :param kwargs: Its arguments.
    :raises ConfigError: It does not take the arguments, or does not make an environment.
    """
    env = Factory(object).instantiate({TARGET_KEY: make}, config_path="env", **kwargs) if callable(make) else make
    if not (hasattr(env, "reset") and hasattr(env, "step")):
        raise ConfigError(
            f"Expected an environment of gymnasium, its id, its class or a function that makes it; found {env!r}."
        )
    return cast("gymnasium.Env[Any, Any]", env)


def import_modules(names: str | Sequence[str]) -> None:
    """Import modules that register environments.

    :param names: Dotted names, or a single one.
    :raises ConfigError: A module cannot be imported.
    """
    for name in [names] if isinstance(names, str) else names:
        module = named_module(name, "env.import")
        if hasattr(module, "register_envs"):  # required by some packages
            gymnasium.register_envs(module)


def gym_wrapped(env: gymnasium.Env[Any, Any], wrappers: Sequence[str | Mapping[str, Any]]) -> gymnasium.Env[Any, Any]:
    """Apply wrappers for gymnasium environments, the first one innermost.

    :param env: The environment.
    :param wrappers: For each the path of a class or function, a name in `gymnasium.wrappers`, or one of both mapped
        to its arguments, of which lists are given as tuples.
    :raises ConfigError: An entry is not a wrapper with its arguments, or cannot wrap the environment.
    """
    for index, entry in enumerate(wrappers):
        where = f"env.gym_wrappers[{index}]"
        try:
            ((path, arguments),) = entry.items() if isinstance(entry, Mapping) else ((entry, None),)
            wrapper = locate(path if "." in path else f"gymnasium.wrappers.{path}", where)
            # configurations have lists, and shapes have to be tuples
            given = {
                key: tuple(value) if isinstance(value, list) else value for key, value in (arguments or {}).items()
            }
            env = wrapper(env, **given)
        except Exception as error:
            raise ConfigError(f"{where}: {entry} cannot wrap {env}: {error}") from error
    return env


def newest_version(name: str) -> str | None:
    """Return the id of the newest registered version of an environment; None if there is none with a version.

    :param name: An id with or without a version, such as `CartPole-v0` or `CartPole`.
    :raises gymnasium.error.Error: It is no valid id.
    """
    namespace, base, _ = parse_env_id(name)
    versions = [
        (spec.version, spec.id)
        for spec in registry.values()
        if spec.namespace == namespace and spec.name == base and spec.version is not None
    ]
    return max(versions)[1] if versions else None


def _register_from_installed_packages(name: str) -> None:
    """Import installed packages that require gymnasium, not for an extra, until one registers the environment."""
    for distribution in list(metadata.distributions()):  # packages may change `sys.path` when they are imported
        if "gym" not in (distribution.read_text("METADATA") or "gym").lower():  # parsing all of them takes a second
            continue
        if any(_GYMNASIUM.match(each.lower()) and "extra" not in each for each in distribution.requires or ()):
            for package in {*modules_of(distribution)} - set(sys.modules):
                with contextlib.suppress(Exception):
                    importlib.import_module(package)
            if name in registry or newest_version(name) is not None:
                return


def _made_in_current_api(entry_point: Any, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    creator: Callable[..., Any] = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    env: gymnasium.Env[Any, Any] = in_current_api(creator(**kwargs))
    return env


def _successor(name: str) -> str | None:
    """Return the newest version of an environment whose named version is retired; `None`: it is not retired.

    Checked beforehand, because gymnasium warns before it raises.
    """
    try:
        version = parse_env_id(name)[2]
        newest = newest_version(name)
    except gymnasium.error.Error:
        return None  # no id; reported by `make`
    if name in registry or version is None or newest is None:
        return None
    return newest if version < (parse_env_id(newest)[2] or 0) else None
