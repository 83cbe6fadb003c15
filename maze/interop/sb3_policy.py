"""Models of stable-baselines3 and sb3-contrib as Maze policies."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
import json
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces

from maze.core.agent.policy import Policy
from maze.core.annotations import override
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import CheckpointError, ConfigError, ConfigImportError, install_command
from maze.core.utils.checkpoint import load_state
from maze.interop.gymnasium_export import mask_heads

_PACKAGES = ("stable_baselines3", "sb3_contrib")
_CLASS = re.compile(r"<class '([\w.]+)'>")
_OWNER_OF_INIT = re.compile(r"<function (\w+)\.__init__ at ")
_NOT_FOR_ACTING = ("optimizer_class", "optimizer_kwargs")
_NAMELESS = "observation"


class SB3Policy(Policy):
    """A saved model of stable-baselines3 or sb3-contrib as a policy in a Maze environment.

    Its file holds weights, and pickles of everything else, which are not loaded: the spaces are the environment's, the
    classes of the policy are looked up by name in stable-baselines3, sb3-contrib and torch, and the weights are read
    like Maze's checkpoints. Models with other classes need `allow_pickle`.

    The model gets the observation that it was trained on, or all of them by name. Policies with masks (`MaskablePPO`)
    get masks of actions. Recurrent policies reset their state when they are seeded, as rollouts do before each episode.
    Q-networks act greedily.

    :param path: File of `model.save`.
    :param observation_spaces_dict: Observation spaces of the environment, by step key. The model acts for all actors.
    :param action_spaces_dict: Its action spaces.
    :param allow_pickle: Load the pickles in the file and in `normalization`, which can run any code.
    :param normalization: File of the `VecNormalize` of the training run, a pickle.
    :param device: `cpu` or `cuda`.
    :raises CheckpointError: The file is not such a model, does not fit the environment, or needs `allow_pickle`.
    :raises ConfigImportError: The package is not installed.
    """

    def __init__(
        self,
        path: str | Path,
        observation_spaces_dict: Mapping[StepKeyType, spaces.Dict],
        action_spaces_dict: Mapping[StepKeyType, spaces.Dict],
        allow_pickle: bool = False,
        normalization: str | Path | None = None,
        device: str = "cpu",
    ) -> None:
        if importlib.util.find_spec("stable_baselines3") is None:
            raise ConfigImportError(f"policy=sb3: stable-baselines3 is not installed: {install_command('sb3')}.")
        path = Path(path)
        path = path if path.exists() or path.suffix else path.with_suffix(".zip")
        step_key, self._head, self._mask = _fitting_entries(observation_spaces_dict, action_spaces_dict)
        stored = _read(path, allow_pickle)
        self._observed, observation_space = _observed(stored, observation_spaces_dict[step_key], path)
        self._takes_dict = isinstance(observation_space, spaces.Dict)
        action_space = action_spaces_dict[step_key].spaces[self._head]
        self.sb3_policy: Any = _built(stored, observation_space, action_space, path, device)
        """The policy of stable-baselines3."""
        self._takes_mask = "action_masks" in inspect.signature(self.sb3_policy.predict).parameters
        self._normalization = None if normalization is None else _normalization(Path(normalization), allow_pickle)
        self._state: Any = None
        self._is_start = np.ones(1, bool)
        self._generators = torch.random.get_rng_state()

    @override(Policy)
    def seed(self, seed: int) -> None:
        self._generators = torch.Generator().manual_seed(seed).get_state()
        self._state, self._is_start = None, np.ones(1, bool)

    @override(Policy)
    def compute_action(
        self,
        observation: Mapping[str, Any],
        maze_state: Any = None,
        env: Any = None,
        actor_id: ActorID | None = None,
        deterministic: bool = False,
    ) -> dict[str, Any]:
        given: dict[str, Any] = {"state": self._state, "episode_start": self._is_start}
        if self._takes_mask and self._mask is not None:
            given["action_masks"] = np.asarray(observation[self._mask]) > 0
        with self._own_generators():
            action, self._state = self.sb3_policy.predict(
                self._shown(observation), deterministic=deterministic, **given
            )
        self._is_start = np.zeros(1, bool)
        return {self._head: action}

    def _shown(self, observation: Mapping[str, Any]) -> Any:
        shown: Any = {key: np.asarray(observation[key]) for key in self._observed}
        if not self._takes_dict:
            shown = next(iter(shown.values()))
        return shown if self._normalization is None else self._normalization.normalize_obs(shown)

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Return a context in which torch's global generator, used by stable-baselines3, has this policy's state."""
        before = torch.random.get_rng_state()
        torch.random.set_rng_state(self._generators)
        try:
            yield
        finally:
            self._generators = torch.random.get_rng_state()
            torch.random.set_rng_state(before)


class _Stored(NamedTuple):
    """The parts of a file that acting needs."""

    described: Mapping[str, Any]
    """The JSON, in which pickled values have a description."""
    policy_class: type[Any]
    policy_kwargs: Mapping[str, Any]
    weights: Mapping[str, Any]


def _read(path: Path, allow_pickle: bool) -> _Stored:
    """Read a file, its pickles only with `allow_pickle`."""
    try:
        with zipfile.ZipFile(path) as archive:
            text, weights = archive.read("data").decode(), archive.read("policy.pth")
        described = json.loads(text)
    except (zipfile.BadZipFile, KeyError, ValueError, OSError) as error:
        raise CheckpointError(
            f"policy.path: {path} is not a model saved by model.save(...) of stable-baselines3 ({error})."
        ) from error
    if allow_pickle:
        from stable_baselines3.common.save_util import json_to_data

        data = json_to_data(text)
        policy_class, policy_kwargs = data["policy_class"], data.get("policy_kwargs") or {}
    else:
        policy_class = _class_of(described.get("policy_class"), path)
        policy_kwargs = {
            key: _plain(key, value, path)
            for key, value in (described.get("policy_kwargs") or {}).items()
            if not key.startswith(":") and key not in _NOT_FOR_ACTING
        }
    return _Stored(described, policy_class, policy_kwargs, load_state(io.BytesIO(weights)))


def _class_of(described: Any, path: Path) -> type[Any]:
    """Return the class of a policy, which its file describes by the text of one of its methods."""
    described = described if isinstance(described, Mapping) else {}
    owner = _OWNER_OF_INIT.match(str(described.get("__init__")))
    module = str(described.get("__module__"))
    if owner is not None:
        return _looked_up(f"{module}.{owner[1]}", path)
    raise _needs_pickle(path, f"its policy is of a class in {module} without a description")


def _plain(key: str, value: Any, path: Path) -> Any:
    """Return an argument of the policy, which its file describes as JSON or, for classes, as text."""
    if not isinstance(value, str) or not value.startswith("<"):
        return value
    named = _CLASS.fullmatch(value)
    if named is None:
        raise _needs_pickle(path, f"its policy_kwargs.{key} is {value}")
    return _looked_up(named[1], path)


def _looked_up(name: str, path: Path) -> type[Any]:
    """Return a class of networks of torch, stable-baselines3 or sb3-contrib by name."""
    module, _, cls = name.rpartition(".")
    package = module.partition(".")[0]
    if package not in _PACKAGES and not module.startswith("torch.nn.modules."):
        raise _needs_pickle(path, f"it consists of {name}, which is part of neither stable-baselines3 nor torch")
    if importlib.util.find_spec(package) is None:
        raise ConfigImportError(f"{path} was made by {package}, which is not installed: {install_command('sb3')}.")
    try:
        found = getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError) as error:
        raise CheckpointError(f"{path} names {name}, which the installed version does not have: {error}") from error
    if not isinstance(found, type) or not issubclass(found, torch.nn.Module):
        raise CheckpointError(f"{path} names {name}, which is not a class of networks.")
    return found


def _needs_pickle(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {reason}. It can only be loaded by running code in the file. If you trust the file, set "
        "policy.allow_pickle=true."
    )


def _fitting_entries(observation_spaces: Any, action_spaces: Any) -> tuple[Any, str, str | None]:
    """Return a step key, the action head, and the observation with its mask.

    :raises ConfigError: There are several action heads, or actors with different spaces.
    """
    step_key = next(iter(action_spaces))
    observation_space, action_space = observation_spaces[step_key], action_spaces[step_key]
    is_dict = isinstance(observation_space, spaces.Dict) and isinstance(action_space, spaces.Dict)
    is_same = all(
        (observation_spaces[key], action_spaces[key]) == (observation_space, action_space) for key in action_spaces
    )
    if not is_dict or len(action_space.spaces) != 1 or not is_same:
        raise ConfigError(
            "policy=sb3: expected actors of one kind with a dictionary of observations and a dictionary with one "
            f"action (without NoDictSpacesWrapper), found the observations {observation_spaces} and the actions "
            f"{action_spaces}."
        )
    (head,) = action_space.spaces
    return step_key, head, next(iter(mask_heads(observation_space, action_space)), None)


def _observed(stored: _Stored, space: spaces.Dict, path: Path) -> tuple[list[str], spaces.Space[Any]]:
    """Return the observations of the model, and its observation space."""
    described = stored.described.get("observation_space")
    described = described if isinstance(described, Mapping) else {}
    if str(described.get(":type:")).endswith(".Dict'>"):
        # the entries are described as text; their names are parsed
        names = re.findall(r"'(\w+)': ", str(described.get("spaces")))
        if missing := [name for name in names if name not in space.spaces]:
            raise CheckpointError(
                f"{path}: the model observes {', '.join(missing)}; here there are {list(space.spaces)}."
            )
        return names, spaces.Dict({name: space.spaces[name] for name in names})
    names = [name for name in space.spaces if not name.endswith("mask")] or list(space.spaces)
    names = [_NAMELESS] if _NAMELESS in names else names
    if len(names) != 1:
        raise CheckpointError(f"{path}: the model has a single observation; here there are {list(space.spaces)}.")
    own, shape = space.spaces[names[0]], tuple(described.get("_shape") or ())
    if isinstance(own, spaces.Box) and len(own.shape) == 3 and shape == (own.shape[2], *own.shape[:2]):
        # stable-baselines3 transposes images
        own = spaces.Box(np.moveaxis(own.low, 2, 0), np.moveaxis(own.high, 2, 0), dtype=own.dtype.type)
    return names, own


def _built(stored: _Stored, observation_space: Any, action_space: Any, path: Path, device: str) -> Any:
    """Build the policy with its weights."""
    kwargs = dict(stored.policy_kwargs)
    for name in _NOT_FOR_ACTING:
        kwargs.pop(name, None)
    if stored.described.get("use_sde") and "use_sde" not in kwargs:
        kwargs["use_sde"] = True
    if "lr_schedule" in inspect.signature(stored.policy_class).parameters:  # not for ARS
        kwargs["lr_schedule"] = lambda _: 0.0
    try:
        policy: Any = stored.policy_class(observation_space, action_space, **kwargs)
        policy.load_state_dict(dict(stored.weights))
    except (RuntimeError, TypeError, AssertionError, ValueError) as error:
        raise CheckpointError(
            f"{path}: the model does not fit this environment with the spaces {observation_space} and "
            f"{action_space}: {error}"
        ) from error
    policy.set_training_mode(False)
    return policy.to(device)


def _normalization(path: Path, allow_pickle: bool) -> Any:
    if not allow_pickle:
        raise CheckpointError(
            f"{path}: files of VecNormalize can only be loaded by running code in them. If you trust the file, set "
            "policy.allow_pickle=true."
        )
    try:
        with path.open("rb") as file:
            return pickle.load(file)
    except Exception as error:
        raise CheckpointError(f"policy.normalization: {path} cannot be loaded: {error}") from error
