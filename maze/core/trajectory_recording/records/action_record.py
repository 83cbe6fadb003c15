"""Records of the actions of an episode, for replay."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from maze.core.env.structured_env import ActorID
from maze.core.errors import CheckpointError, EnvironmentContractError
from maze.core.utils.files import file_stem, json_with_checksum, open_json, write_whole

# Name of an action that is not a dictionary.
_SINGLE_ACTION = ""
_MAX_ITEM_SIZE = 1 << 16


@dataclass
class ActionRecord:
    """Actions of an episode in order, and the seed of its environment.

    Stored as JSON, which contains no code.

    :param episode_id: The episode.
    :param seed: Seed of the environment; `None`: the episode was not the first one after seeding.
    """

    episode_id: str
    seed: int | None
    actions: list[tuple[ActorID, Any]] = field(default_factory=list)
    """Actor and action of each (sub-)step."""

    def append(self, actor_id: ActorID, action: Any) -> None:
        """Add the next action.

        :param actor_id: The actor.
        :param action: Its action, numbers or arrays by action head.
        """
        self.actions.append((actor_id, action))

    def __copy__(self) -> ActionRecord:
        return replace(self, actions=list(self.actions))

    def __len__(self) -> int:
        return len(self.actions)

    def save(self, directory: Path) -> Path:
        """Write `<episode id>.json` atomically.

        :param directory: Directory of the file, which is created if necessary.
        """
        content = {
            "episode_id": self.episode_id,
            "seed": self.seed,
            "actions": [[actor.step_key, actor.agent_id, _plain(action)] for actor, action in self.actions],
        }
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{file_stem(self.episode_id)}.json"
        write_whole(path, json_with_checksum(json.dumps(content, default=int).encode()))  # numbers of NumPy
        return path

    @classmethod
    def load(cls, path: Path | str) -> ActionRecord:
        """Read a file of :meth:`save`.

        :param path: The file.
        :raises CheckpointError: The file cannot be read, or is not a record of actions.
        """
        try:
            content = json.loads(open_json(Path(path).read_bytes(), str(path)).decode())
            record = cls(content["episode_id"], content["seed"])
            for step_key, agent_id, action in content["actions"]:
                record.append(ActorID(step_key, agent_id), _restored(action))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
            raise CheckpointError(
                f"{path} is not a valid record of actions ({type(error).__name__}: {error}). Rollouts with "
                f"runner.record_actions=true write them."
            ) from error
        return record


def plain_seed(seed: Any) -> int | None:
    """Return a seed as an integer; `None`: it is not an integer."""
    return int(seed) if isinstance(seed, (int, np.integer)) else None


def _plain(action: Any) -> dict[str, list[Any]]:
    named = action if isinstance(action, Mapping) else {_SINGLE_ACTION: action}
    plain = {}
    for name, value in named.items():
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise EnvironmentContractError(
                f"Action `{name}` cannot be recorded: expected numbers or arrays, found {type(value).__name__}."
            )
        plain[str(name)] = [array.dtype.str, array.tolist()]
    return plain


def _restored(plain: Mapping[str, list[Any]]) -> Any:
    action = {}
    for name, (text, value) in plain.items():
        dtype: np.dtype[Any] = np.dtype(str(text))
        if dtype.hasobject or dtype.itemsize > _MAX_ITEM_SIZE:
            raise ValueError(f"values of type {text}")
        action[name] = np.asarray(value, dtype)[()]
    return action[_SINGLE_ACTION] if list(action) == [_SINGLE_ACTION] else action
