"""Models of stable-baselines3 and sb3-contrib as Maze policies, and Maze policies as such models."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
import json
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from maze.core.agent.action_distribution import chosen_actions
from maze.core.agent.policy import Policy
from maze.core.annotations import override
from maze.core.env.action_conversion import ActionBounds
from maze.core.env.space_values import action_leaves, split_rows
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import CheckpointError, ConfigError, ConfigImportError, EnvironmentContractError, install_command
from maze.core.rollout.rollout_runner import RolloutRunner
from maze.core.utils.checkpoint import load_state
from maze.core.utils.factory import Factory
from maze.core.wrappers.gym_adapters import adapted, gym_env_name
from maze.core.wrappers.maze_gym_env_wrapper import GymActionConversion, GymObservationConversion
from maze.distributions.utils import isolated_global_generator
from maze.interop.gymnasium_export import dict_spaces, mask_heads

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
    get masks of actions. Recurrent policies have a state for each actor of each environment, which begins anew with
    each episode; without `env` it lasts until they are seeded. Q-networks act greedily.

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
        observed: list[Any] = list(observation_spaces_dict.values())
        actions: list[Any] = list(action_spaces_dict.values())
        is_dict = isinstance(observed[0], spaces.Dict) and isinstance(actions[0], spaces.Dict)
        is_same = all(space == kind[0] for kind in (observed, actions) for space in kind)
        if not is_dict or len(actions[0].spaces) != 1 or not is_same:
            raise ConfigError(
                "policy=sb3: expected actors of one kind with a dictionary of observations and a dictionary with one "
                f"action (without NoDictSpacesWrapper), found the observations {observation_spaces_dict} and the "
                f"actions {action_spaces_dict}."
            )
        ((self._head, action_space),) = actions[0].spaces.items()
        self._mask = next(iter(mask_heads(observed[0], actions[0])), None)
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
            policy_class, kwargs = data["policy_class"], dict(data.get("policy_kwargs") or {})
        else:
            policy_class, kwargs = _described_policy(described, path)
        self._observed, observation_space = _observed(described.get("observation_space"), observed[0], path)
        self._takes_dict = isinstance(observation_space, spaces.Dict)
        kwargs = {key: value for key, value in kwargs.items() if key not in _NOT_FOR_ACTING}
        if described.get("use_sde"):
            kwargs.setdefault("use_sde", True)
        if "lr_schedule" in inspect.signature(policy_class).parameters:  # not for ARS
            kwargs["lr_schedule"] = lambda _: 0.0
        try:
            self.sb3_policy: Any = policy_class(observation_space, action_space, **kwargs)
            """The policy of stable-baselines3."""
            self.sb3_policy.load_state_dict(dict(load_state(io.BytesIO(weights))))
        except (RuntimeError, TypeError, AssertionError, ValueError) as error:
            raise CheckpointError(
                f"{path}: the model does not fit this environment with the spaces {observation_space} and "
                f"{action_space}: {error}"
            ) from error
        self.sb3_policy.set_training_mode(False)
        self.sb3_policy.to(device)
        self._takes_mask = "action_masks" in inspect.signature(self.sb3_policy.predict).parameters
        self._normalization: Any = None
        if normalization is not None:
            if not allow_pickle:
                raise _needs_pickle(Path(normalization), "it is a pickle of VecNormalize")
            with Path(normalization).open("rb") as file:
                self._normalization = pickle.load(file)
        # By environment (its context) and actor the number of the episode and the state of a recurrent policy.
        self._states: WeakKeyDictionary[Any, dict[ActorID | None, tuple[int, Any]]] = WeakKeyDictionary()
        self._generator = torch.Generator()
        self._generator.seed()

    @override(Policy)
    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)
        self._states.clear()

    @override(Policy)
    def needs_env(self) -> bool:
        return hasattr(self.sb3_policy, "lstm_hidden_state_shape")  # it is recurrent

    @override(Policy)
    def compute_action(
        self,
        observation: Mapping[str, Any],
        maze_state: Any = None,
        env: Any = None,
        actor_id: ActorID | None = None,
        deterministic: bool = False,
    ) -> dict[str, Any]:
        context: Any = getattr(env, "context", self)
        n_episodes, states = getattr(context, "n_episodes", 0), self._states.setdefault(context, {})
        episode, state = states.get(actor_id, (0, None))
        state = state if episode == n_episodes else None
        given: dict[str, Any] = {"state": state, "episode_start": np.array([state is None])}
        if self._takes_mask and self._mask is not None:
            given["action_masks"] = np.asarray(observation[self._mask]) > 0
        with isolated_global_generator(self._generator):
            action, state = self.sb3_policy.predict(self._shown(observation), deterministic=deterministic, **given)
        states[actor_id] = n_episodes, state
        return {self._head: action}

    def _shown(self, observation: Mapping[str, Any]) -> Any:
        shown: Any = {key: np.asarray(observation[key]) for key in self._observed}
        if not self._takes_dict:
            shown = next(iter(shown.values()))
        return shown if self._normalization is None else self._normalization.normalize_obs(shown)


def _described_policy(described: Any, path: Path) -> tuple[type[Any], dict[str, Any]]:
    """Return the class and the arguments of a policy, which its file describes as JSON and, for classes, as text."""
    policy = described.get("policy_class")
    policy = policy if isinstance(policy, Mapping) else {}
    if (owner := _OWNER_OF_INIT.match(str(policy.get("__init__")))) is None:
        raise _needs_pickle(path, f"its policy is of a class in {policy.get('__module__')} without a description")
    kwargs = {}
    for key, value in (described.get("policy_kwargs") or {}).items():
        if key.startswith(":") or key in _NOT_FOR_ACTING:
            continue
        kwargs[key] = value
        if isinstance(value, str) and value.startswith("<"):
            if (named := _CLASS.fullmatch(value)) is None:
                raise _needs_pickle(path, f"its policy_kwargs.{key} is {value}")
            kwargs[key] = _looked_up(named[1], path)
    return _looked_up(f"{policy.get('__module__')}.{owner[1]}", path), kwargs


def _looked_up(name: str, path: Path) -> type[Any]:
    """Return a class of networks of torch, stable-baselines3 or sb3-contrib by name."""
    module, _, cls = name.rpartition(".")
    package = module.partition(".")[0]
    if package not in _PACKAGES and not module.startswith("torch.nn.modules."):
        raise _needs_pickle(path, f"it consists of {name}, which is part of neither stable-baselines3 nor torch")
    try:
        found = getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError) as error:
        raise CheckpointError(
            f"{path} names {name}, which is not installed, or not in this version: {error}. {install_command('sb3')}"
        ) from error
    if not isinstance(found, type) or not issubclass(found, torch.nn.Module):
        raise CheckpointError(f"{path} names {name}, which is not a class of networks.")
    return found


def _needs_pickle(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {reason}. It can only be loaded by running code in the file. If you trust the file, set "
        "policy.allow_pickle=true."
    )


def _observed(described: Any, space: spaces.Dict, path: Path) -> tuple[list[str], spaces.Space[Any]]:
    """Return the observations of the model, and its observation space.

    :param described: Description of its space.
    """
    described = described if isinstance(described, Mapping) else {}
    if str(described.get(":type:")).endswith(".Dict'>"):
        # the entries are described as text; their names are parsed
        names = re.findall(r"'(\w+)': ", str(described.get("spaces")))
        if missing := [name for name in names if name not in space.spaces]:
            raise CheckpointError(f"{path}: the model observes {', '.join(missing)}; there are {list(space.spaces)}.")
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


# -- Maze policies in stable-baselines3 --------------------------------------------------------------------------------


@dataclass(eq=False)
class SB3Predictor:
    """A policy with the `predict` method of stable-baselines3 models: for `evaluate_policy`, `VecVideoRecorder`, ...

    :param policy: A policy that needs observations only.
    :param actor_id: The actor that it acts for.
    :param shapes: Shapes of its observations, by name, without the batch dimension.
    :param heads: Conversion of the policy's actions `[n_envs, ...]` to the environment's, by action head: clips them,
        as models of stable-baselines3 do.
    :param packs_actions: Whether actions with one head are dictionaries, too.
    :raises ConfigError: The policy needs the environment or its state.
    """

    policy: Policy
    actor_id: ActorID
    shapes: Mapping[str, tuple[int, ...]]
    heads: Mapping[str, Callable[[np.ndarray], np.ndarray]]
    packs_actions: bool = False

    def __post_init__(self) -> None:
        if not self.policy.is_recurrent and (self.policy.needs_state() or self.policy.needs_env()):
            raise ConfigError(
                f"to_sb3: {type(self.policy).__name__} needs the environment or its state, but `predict` gets only "
                "observations."
            )

    def predict(
        self, observation: Any, state: Any = None, episode_start: np.ndarray | None = None, deterministic: bool = False
    ) -> tuple[Any, Any]:
        """Compute actions.

        :param observation: An array, or a dictionary of arrays, of one environment or of several, `[n_envs, ...]`.
        :param state: The state returned with the previous actions: hidden states `[n_envs, size]` of a recurrent policy
            by key. For other policies it is returned unchanged.
        :param episode_start: Whether an episode begins, `[n_envs]`: resets the state of a recurrent policy.
        :param deterministic: Take deterministic actions instead of sampling.
        :return: Actions, `[n_envs, ...]` for several environments, and the state. Dictionary actions are a list, one
            for each environment.
        :raises EnvironmentContractError: An observation or a hidden state is missing, or has another shape.
        """
        entries = self._entries(observation)
        is_batch = all(value.ndim > len(self.shapes[name]) for name, value in entries.items())
        for name, value in entries.items():
            if value.shape[int(is_batch) :] != self.shapes[name]:
                shape = self.shapes[name]
                raise EnvironmentContractError(
                    f"predict: expected the observation `{name}` in the shape {shape}, or, for all observations, "
                    f"{('n_envs', *shape)}, found {value.shape}."
                )
        batch = {name: value if is_batch else value[np.newaxis] for name, value in entries.items()}
        more = {}
        if self.policy.is_recurrent:
            more["states"] = state = self._states(state, episode_start, len(next(iter(batch.values()))))
        chosen = chosen_actions(self.policy, batch, self.actor_id, deterministic, **more)
        actions = {head: convert(chosen[head]) for head, convert in self.heads.items()}
        is_packed = self.packs_actions or len(actions) > 1
        rows: Any = split_rows(actions) if is_packed else next(iter(actions.values()))
        return (rows if is_batch else rows[0]), state

    def seed(self, seed: int) -> None:
        """Seed the policy's generators."""
        self.policy.seed(seed)

    def _states(self, state: Any, episode_start: np.ndarray | None, n_rows: int) -> dict[str, np.ndarray]:
        """Return hidden states `[n_rows, size]` by key, which the recurrent policy overwrites."""
        policy: Any = self.policy
        states = {key: np.zeros((n_rows, size), np.float32) for key, size in policy.state_sizes(self.actor_id).items()}
        for key, array in states.items():
            if state is not None:
                found = np.shape(state[key]) if isinstance(state, Mapping) and key in state else None
                if found != array.shape:
                    raise EnvironmentContractError(
                        f"predict: expected the `state` of the previous call, `{key}` in the shape {array.shape}, "
                        f"found {found}."
                    )
                array[...] = state[key]
            if episode_start is not None:
                array[np.asarray(episode_start, np.bool_)] = 0.0
        return states

    def _entries(self, observation: Any) -> dict[str, np.ndarray]:
        if not isinstance(observation, Mapping):
            if len(self.shapes) != 1:
                raise EnvironmentContractError(
                    f"predict: expected a dictionary with the observations {', '.join(self.shapes)}, found one array."
                )
            observation = {next(iter(self.shapes)): observation}
        if missing := [name for name in self.shapes if name not in observation]:
            raise EnvironmentContractError(
                f"predict: the observation {', '.join(missing)} is missing; there are {', '.join(observation)}."
            )
        return {name: np.asarray(observation[name]) for name in self.shapes}


def to_sb3(policy: Policy | str | Path, env: Any = None, trusted_packages: Sequence[str] = ()) -> SB3Predictor:
    """Give a Maze policy the method `predict(observation, state, episode_start, deterministic)`.

    Observations are those of the environment with the wrappers that the policy was trained with, as
    :func:`~maze.interop.to_gymnasium` exports it, single or dictionaries. Continuous actions are clipped to the action
    space.

    :param policy: A policy, the directory of a training run, or the file of a policy bundle.
    :param env: The environment of the caller: of Maze, exported or not, or of gymnasium. Actions are elements of its
        action space: dictionaries if it is one, counted from the `start` of a `Discrete` space of gymnasium. Required
        for a policy object, unless it was loaded from a run.
    :param trusted_packages: Further packages that the configuration of a run may name.
    :raises ConfigError: Spaces are unknown, there are several actors with different spaces, or the actions are not
        those of `env`.
    :raises CheckpointError: The run, or the bundle, cannot be read.
    """
    acted_in = getattr(env, "maze_env", env)
    packs_actions = acted_in is not None and isinstance(acted_in.action_space, spaces.Dict)
    foreign = None
    if isinstance(acted_in, gymnasium.Env):
        foreign = adapted(acted_in)
        known: Any = ({0: GymObservationConversion(foreign).space()}, {0: GymActionConversion(foreign).space()})
    else:
        known = _spaces_of(acted_in) if acted_in is not None else None
    if isinstance(policy, str | Path):
        path = Path(policy)
        if path.is_file():
            bundled: Any = Factory(Policy).instantiate(  # type: ignore[type-abstract]  # a concrete one
                {"_target_": "maze.serve.policy.BundlePolicy", "bundle": str(path)}
            )
            step_key, step = next(iter(bundled.bundle.steps.items()))
            shapes = {name: tuple(shape) for name, shape in step.inputs.items()}
            described = bundled.bundle.card["steps"][0]["heads"]
            heads = _heads({head: _space_of(described[head]) for head in step.heads}, foreign)
            return SB3Predictor(bundled, ActorID(step_key, 0), shapes, heads, packs_actions)
        own_env, policy = RolloutRunner.init_stored_env_and_agent(path, trusted_packages)
        known = _spaces_of(own_env)
        own_env.close()
    elif known is None and (stored := getattr(policy, "spaces", None)) is not None:
        known = (stored.observation_spaces_dict, stored.action_spaces_dict)
    if known is None:
        raise ConfigError("to_sb3: name the environment that the policy acts in, to_sb3(policy, env).")
    observation_spaces, action_spaces = known
    if len(action_spaces) != 1:
        raise ConfigError(
            f"to_sb3: the policy acts in the sub-steps {list(action_spaces)}, and models of stable-baselines3 in one."
        )
    ((step_key, observation_space),) = observation_spaces.items()
    shapes = {name: tuple(space.shape or ()) for name, space in observation_space.spaces.items()}
    heads = _heads(action_spaces[step_key].spaces, foreign)
    return SB3Predictor(policy, ActorID(step_key, 0), shapes, heads, packs_actions)


def _heads(action_space: Mapping[str, spaces.Space[Any]], env: Any) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Return the conversion of the policy's actions to the environment's, by head.

    :param action_space: Spaces of the policy's heads.
    :param env: The gymnasium environment of the caller; `None`: it is one of Maze.
    """
    bounds = ActionBounds(spaces.Dict(dict(action_space)))
    if env is None:
        return {head: partial(bounds.clip_rows, head) for head in action_space}
    leaves = action_leaves(env.action_space)[1]
    expected = {head: leaf.space.shape for head, leaf in leaves.items()}
    found = {head: space.shape for head, space in action_space.items()}
    if found != expected:
        raise ConfigError(
            f"to_sb3: the policy chooses actions of the shapes {found}, and {gym_env_name(env)} takes {expected}. "
            "Give the environment with the wrappers that the policy was trained with, exported by to_gymnasium."
        )

    def convert(head: str, values: np.ndarray) -> np.ndarray:
        return leaves[head].batch_to_gym(bounds.clip_rows(head, values))

    return {head: partial(convert, head) for head in action_space}


def _space_of(described: Mapping[str, Any]) -> spaces.Space[Any]:
    """Return the space of a bundle's head as a box, of which only the shape matters for discrete heads."""
    shape = tuple(described["shape"])
    low, high = (np.array(described.get(bound), np.float64) for bound in ("low", "high"))  # null, unbounded, is NaN
    low, high = np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)
    return spaces.Box(np.broadcast_to(low, shape), np.broadcast_to(high, shape), dtype=np.float64)


def _spaces_of(env: Any) -> tuple[Mapping[Any, Any], Mapping[Any, Any]]:
    """Return observation and action spaces by step key."""
    return dict_spaces(env, "observation_spaces_dict"), dict_spaces(env, "action_spaces_dict")
