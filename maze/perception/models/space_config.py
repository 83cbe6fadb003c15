"""The spaces that a model was built for, as a file."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.agent.random_policy import candidates_of
from maze.core.env.action_conversion import MASK_SUFFIX
from maze.core.env.structured_env import StepKeyType
from maze.core.errors import CheckpointError, ConfigError
from maze.core.utils.files import verify_checksum, write_with_checksum
from maze.core.utils.pickle_reader import Rule, read_pickle, refuse

_FORMAT = "maze-spaces-1"


@dataclass
class SpacesConfig:
    """Action and observation spaces and agent counts of an environment, the input of model composers.

    The file is a pickle of plain dictionaries, lists, numbers, strings and bytes. It names no types, so loading it
    cannot execute anything.

    :param action_spaces_dict: Action spaces by step key.
    :param observation_spaces_dict: Observation spaces by step key.
    :param agent_counts_dict: Number of agents by step key; -1: it changes.
    """

    action_spaces_dict: dict[StepKeyType, spaces.Dict]
    observation_spaces_dict: dict[StepKeyType, spaces.Dict]
    agent_counts_dict: dict[StepKeyType, int]

    def __post_init__(self) -> None:
        for kind, by_key in (("action", self.action_spaces_dict), ("observation", self.observation_spaces_dict)):
            for key, space in by_key.items():
                if not isinstance(space, spaces.Dict):
                    raise ConfigError(
                        f"env: sub-step {key!r}: expected a gymnasium.spaces.Dict from `space()` of the {kind} "
                        f"conversion, found {space}."
                    )

    def differences(self, env: Any) -> list[str]:
        """Return the reasons why a model of these spaces cannot act in an environment; empty: it can.

        Additional observations, other bounds of observations and other numbers of candidates are permitted (see
        :func:`~maze.core.agent.random_policy.candidates_of`). Numbers of agents are not compared.

        :param env: The environment with its wrappers.
        :return: A sentence fragment for each entry of a space that is missing or does not fit.
        """
        found = []
        chosen = candidates_of(self.action_spaces_dict, self.observation_spaces_dict)
        of_any_number = {f"{head}_{MASK_SUFFIX}" for head in chosen}
        of_any_number |= {*chosen, *chosen.values(), *(f"{key}_{MASK_SUFFIX}" for key in chosen.values())}
        for kind, known, there in (
            ("observation", self.observation_spaces_dict, env.observation_spaces_dict),
            ("action", self.action_spaces_dict, env.action_spaces_dict),
        ):
            for step_key in dict.fromkeys([*known, *there]):
                mine: Mapping[str, Any] = known.get(step_key, {})
                its: Mapping[str, Any] = there.get(step_key, {})
                for name in dict.fromkeys([*mine, *(its if kind == "action" else ())]):
                    one, other = mine.get(name), its.get(name)
                    if not _fit(one, other, bounds=kind == "action", any_number=name in of_any_number):
                        entry = f"{kind} {name!r} of sub-step {step_key!r}"
                        found.append(f"{entry}: {one or 'none'} in training, {other or 'none'} here")
        return found

    def require_same(self, env: Any, origin: str | Path) -> None:
        """Compare the spaces with those of an environment in which a model of these spaces is to act.

        :param env: The environment.
        :param origin: Source of the model, for messages.
        :raises CheckpointError: There are :meth:`differences`, which the message names.
        """
        if differences := self.differences(env):
            raise CheckpointError(
                f"{origin}: the policy was trained in an environment with other spaces. {'; '.join(differences)}. Use "
                "the environment and the wrappers of its training: leave env and wrappers out, and they are taken over."
            )

    def save(self, dump_file_path: str | Path) -> None:
        """Write the file; a crash leaves the previous one untouched.

        :param dump_file_path: Path of the file, which is replaced if it exists.
        :raises ConfigError: A space is neither `Box`, `Discrete`, `MultiDiscrete`, `MultiBinary` nor a `Dict` of these.
        """
        content = {
            "format": _FORMAT,
            "action_spaces": {key: _describe(space) for key, space in self.action_spaces_dict.items()},
            "observation_spaces": {key: _describe(space) for key, space in self.observation_spaces_dict.items()},
            "agent_counts": {key: int(count) for key, count in self.agent_counts_dict.items()},
        }
        write_with_checksum(dump_file_path, pickle.dumps(content, protocol=4))

    @classmethod
    def load(cls, in_file_path: str | Path) -> SpacesConfig:
        """Read a file that :meth:`save` wrote.

        :param in_file_path: Path of the file.
        :raises CheckpointError: The file is missing, damaged, or not a file of spaces.
        """
        path = Path(in_file_path)
        if not path.is_file():
            raise CheckpointError(
                f"{path}: there is no such file. A training run writes `spaces_config.pkl` into its directory."
            )
        try:
            content = read_pickle(verify_checksum(path.read_bytes(), str(path)), _no_rule)
            if not isinstance(content, dict) or content.get("format") != _FORMAT:
                raise ValueError("it does not hold spaces")
            return cls(
                action_spaces_dict={key: _dict_space(text) for key, text in content["action_spaces"].items()},
                observation_spaces_dict={key: _dict_space(text) for key, text in content["observation_spaces"].items()},
                agent_counts_dict=dict(content["agent_counts"]),
            )
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle raises almost anything
            raise CheckpointError(f"{path}: not a file of spaces written by Maze ({error}).") from error


def _fit(one: Any, other: Any, bounds: bool, any_number: bool = False) -> bool:
    if type(one) is not type(other) or one is None:
        return False
    if any_number and isinstance(one, spaces.Discrete | spaces.Box):
        return (one.shape or ())[1:] == (other.shape or ())[1:]
    if isinstance(one, spaces.Dict):
        return one.keys() == other.keys() and all(_fit(one[key], other[key], bounds) for key in one)
    return bool(one.shape == other.shape if isinstance(one, spaces.Box) and not bounds else one == other)


def _no_rule(module_name: str, global_name: str) -> Rule:
    raise refuse(f"it names the type {module_name}.{global_name}, which a file of spaces must not contain")


# Attributes that describe a space, and are arguments of its type.
_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "Box": ("low", "high"),
    "Discrete": ("n", "start", "dtype"),
    "MultiDiscrete": ("nvec", "start", "dtype"),
    "MultiBinary": ("n",),
}


def _describe(space: spaces.Space[Any]) -> dict[str, Any]:
    """Return a description of the space in plain values."""
    name = type(space).__name__
    if type(space) is spaces.Dict:
        return {"type": name, "spaces": [[key, _describe(sub)] for key, sub in space.spaces.items()]}
    if name not in _ARGUMENTS or type(space) is not getattr(spaces, name):
        raise ConfigError(f"The space {space} of type {name} cannot be saved. Use gymnasium's basic spaces.")
    return {"type": name, **{argument: _plain(getattr(space, argument)) for argument in _ARGUMENTS[name]}}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": list(value.shape), "bytes": value.tobytes()}
    if isinstance(value, np.dtype | type):
        return np.dtype(value).str
    return value.item() if isinstance(value, np.generic) else value


def _space(text: Mapping[str, Any]) -> spaces.Space[Any]:
    name = text["type"]
    if name == "Dict":
        return spaces.Dict({key: _space(sub) for key, sub in text["spaces"]})
    arguments = {key: text[key] for key in _ARGUMENTS[name]}
    for key, value in arguments.items():
        if isinstance(value, dict):  # a copy, because frombuffer's is read-only
            arguments[key] = np.frombuffer(value["bytes"], dtype=value["dtype"]).reshape(value["shape"]).copy()
    dtype = arguments["low"].dtype if name == "Box" else np.dtype(arguments.pop("dtype", np.int64))
    if dtype != np.int64 or name == "Box":  # gymnasium 1.2 knows no other type of Discrete, and no argument for it
        arguments["dtype"] = dtype.type
    built: spaces.Space[Any] = getattr(spaces, name)(**arguments)
    return built


def _dict_space(text: Mapping[str, Any]) -> spaces.Dict:
    space = _space(text)
    if not isinstance(space, spaces.Dict):
        raise ValueError(f"expected a Dict space, found {space}")
    return space
