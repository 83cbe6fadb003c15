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
from collections.abc import Iterator, Mapping, Sequence
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
    :raises CheckpointError: The file is no such model, does not fit the environment, or needs `allow_pickle`.
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
        self._path = _found(Path(path))
        self._step_key = _only_kind_of_actor(observation_spaces_dict, action_spaces_dict, self._path)
        self._head, self._observed, self._mask = _fitting_entries(
            observation_spaces_dict[self._step_key], action_spaces_dict[self._step_key]
        )
        stored = _read(self._path, allow_pickle)
        observation_space = _observation_space(
            stored, observation_spaces_dict[self._step_key], self._observed, self._path
        )
        self._takes_dict = isinstance(observation_space, spaces.Dict)
        self.sb3_policy: Any = _built(
            stored, observation_space, action_spaces_dict[self._step_key].spaces[self._head], self._path, device
        )
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

    @override(Policy)
    def compute_top_action_candidates(
        self,
        observation: Mapping[str, Any],
        num_candidates: int | None,
        maze_state: Any,
        env: Any,
        actor_id: ActorID | None = None,
    ) -> tuple[Sequence[dict[str, Any]], Sequence[float]]:
        """Return discrete actions of actor-critics by their probabilities; of other models the chosen action."""
        from stable_baselines3.common.policies import ActorCriticPolicy

        policy = self.sb3_policy
        is_ranked = isinstance(policy.action_space, spaces.Discrete) and hasattr(policy, "get_distribution")
        if not is_ranked or not (isinstance(policy, ActorCriticPolicy) or self._takes_mask) or self._is_recurrent:
            return super().compute_top_action_candidates(observation, num_candidates, maze_state, env, actor_id)
        mask = (
            {} if self._mask is None or not self._takes_mask else {"action_masks": np.asarray(observation[self._mask])}
        )
        with torch.no_grad():
            shown, _ = policy.obs_to_tensor(self._shown(observation))
            probabilities = policy.get_distribution(shown, **mask).distribution.probs[0].cpu().numpy()
        ranked = np.argsort(-probabilities, kind="stable")[:num_candidates]
        return [{self._head: np.int64(index)} for index in ranked], [float(probabilities[index]) for index in ranked]

    @property
    def _is_recurrent(self) -> bool:
        return "Recurrent" in type(self.sb3_policy).__name__

    def _shown(self, observation: Mapping[str, Any]) -> Any:
        shown: Any = {key: np.asarray(observation[key]) for key in self._observed}
        if not self._takes_dict:
            shown = next(iter(shown.values()))
        return shown if self._normalization is None else self._normalization.normalize_obs(shown)

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Context in which torch's global generator, which stable-baselines3 uses, has the state of this policy."""
        before = torch.random.get_rng_state()
        torch.random.set_rng_state(self._generators)
        try:
            yield
        finally:
            self._generators = torch.random.get_rng_state()
            torch.random.set_rng_state(before)


class _Stored(NamedTuple):
    """The parts of a file that acting needs."""

    data: Mapping[str, Any]
    policy_class: type[Any]
    policy_kwargs: Mapping[str, Any]
    weights: Mapping[str, Any]


def _found(path: Path) -> Path:
    path = path if path.exists() or path.suffix else path.with_suffix(".zip")
    if not path.is_file():
        raise CheckpointError(f"policy.path: there is no file {path}; model.save(...) of stable-baselines3 writes one.")
    return path


def _read(path: Path, allow_pickle: bool) -> _Stored:
    """Read a file, its pickles only with `allow_pickle`."""
    try:
        with zipfile.ZipFile(path) as archive:
            text, weights = archive.read("data").decode(), archive.read("policy.pth")
        described = json.loads(text)
    except (zipfile.BadZipFile, KeyError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is no model that stable-baselines3 has saved ({error}).") from error
    if allow_pickle:
        from stable_baselines3.common.save_util import json_to_data

        data = json_to_data(text)
        policy_class, policy_kwargs = data["policy_class"], data.get("policy_kwargs") or {}
    else:
        data = described
        policy_class = _class_of(described.get("policy_class"), path)
        policy_kwargs = {
            key: _plain(key, value, path)
            for key, value in (described.get("policy_kwargs") or {}).items()
            if not key.startswith(":") and key not in _NOT_FOR_ACTING
        }
    return _Stored(data, policy_class, policy_kwargs, load_state(io.BytesIO(weights)))


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
        raise CheckpointError(f"{path} names {name}, which is no class of networks.")
    return found


def _needs_pickle(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {reason}. It can only be loaded by running code in the file. If you trust the file, set "
        "policy.allow_pickle=true."
    )


def _only_kind_of_actor(observation_spaces: Mapping[Any, Any], action_spaces: Mapping[Any, Any], path: Path) -> Any:
    first, *others = action_spaces
    same = all(
        (action_spaces[key], observation_spaces[key]) == (action_spaces[first], observation_spaces[first])
        for key in others
    )
    if not same:
        raise CheckpointError(
            f"{path}: a model of stable-baselines3 acts for actors of one kind, but the sub-steps "
            f"{list(action_spaces)} of this environment have different spaces."
        )
    return first


def _fitting_entries(observation_space: Any, action_space: Any) -> tuple[str, list[str], str | None]:
    """Return the action head, the observations of the model, and the mask."""
    for name, space in (("observation", observation_space), ("action", action_space)):
        if not isinstance(space, spaces.Dict):
            raise ConfigError(
                f"policy=sb3: expected a dictionary {name} space, found {space}. Remove NoDictSpacesWrapper."
            )
    if len(action_space.spaces) != 1:
        raise ConfigError(
            f"policy=sb3: models of stable-baselines3 take one action, but the environment has {list(action_space)}."
        )
    (head,) = action_space.spaces
    mask = next(iter(mask_heads(observation_space, action_space)), None)
    return head, list(observation_space.spaces), mask


def _observation_space(stored: _Stored, space: spaces.Dict, observed: list[str], path: Path) -> spaces.Space[Any]:
    """Return the observation space of the model; `observed` is reduced to its entries, in place."""
    described = stored.data.get("observation_space")
    if isinstance(described, spaces.Space):
        kind, shape = type(described).__name__, list(described.shape or ())
        names = list(described.spaces) if isinstance(described, spaces.Dict) else None
    else:
        described = described if isinstance(described, Mapping) else {}
        named = _CLASS.fullmatch(str(described.get(":type:")))
        kind, shape = "" if named is None else named[1].rpartition(".")[2], described.get("_shape") or []
        # the entries are described as text; their names are parsed
        names = re.findall(r"'(\w+)': ", str(described.get("spaces"))) if kind == "Dict" else None
    if names is not None:
        if missing := [name for name in names if name not in space.spaces]:
            raise CheckpointError(
                f"{path}: the model observes {', '.join(missing)}; here there are {list(space.spaces)}."
            )
        observed[:] = names
        return spaces.Dict({name: space.spaces[name] for name in names})
    shown = [name for name in observed if not name.endswith("mask")] or observed
    observed[:] = [_NAMELESS] if _NAMELESS in shown else shown
    if len(observed) != 1:
        raise CheckpointError(f"{path}: the model observes one {kind or 'space'}; here there are {list(space.spaces)}.")
    own: Any = space.spaces[observed[0]]
    if isinstance(own, spaces.Box) and len(own.shape) == 3 and list(own.shape) != shape:
        channels_first = (own.shape[2], *own.shape[:2])
        if list(channels_first) == shape:  # stable-baselines3 transposes images
            return spaces.Box(np.moveaxis(own.low, 2, 0), np.moveaxis(own.high, 2, 0), dtype=own.dtype.type)
    if isinstance(own, spaces.Box) and shape and list(own.shape) != shape:
        raise CheckpointError(f"{path}: the model observes the shape {shape}; `{observed[0]}` has {list(own.shape)}.")
    return own  # type: ignore[no-any-return]  # a space


def _built(stored: _Stored, observation_space: Any, action_space: Any, path: Path, device: str) -> Any:
    """Build the policy with its weights."""
    kwargs = dict(stored.policy_kwargs)
    for name in _NOT_FOR_ACTING:
        kwargs.pop(name, None)
    if stored.data.get("use_sde") and "use_sde" not in kwargs:
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
