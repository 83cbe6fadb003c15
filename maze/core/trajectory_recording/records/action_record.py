"""The actions of an episode, from which it can be run again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maze.core.env.structured_env import ActorID
from maze.core.errors import CheckpointError, EnvironmentContractError
from maze.core.utils.files import open_json, seal_json, write_whole

_SINGLE_ACTION = ""
"""Stands for the name of an action that is no dictionary."""
_MAX_ITEM_SIZE = 1 << 16


class ActionRecord:
    """An episode's actions in the order in which they were taken, and the seed that its environment began with.

    Stored as JSON, which anybody can read and nothing in which is executed.

    :param episode_id: The episode.
    :param seed: Seed of the environment; None where the episode was not the first one after seeding.
    """

    def __init__(self, episode_id: str, seed: int | None) -> None:
        self.episode_id = episode_id
        self.seed = seed
        self.actions: list[tuple[ActorID, Any]] = []
        """Actor and action of each (sub-)step."""

    def append(self, actor_id: ActorID, action: Any) -> None:
        """Adds the next action."""
        self.actions.append((actor_id, action))

    def copy(self) -> ActionRecord:
        """A record that goes on by itself."""
        twin = ActionRecord(self.episode_id, self.seed)
        twin.actions = list(self.actions)
        return twin

    def __len__(self) -> int:
        return len(self.actions)

    def save(self, directory: Path) -> Path:
        """Writes `<episode id>.json`, whole or not at all.

        :param directory: Where to; created if need be.
        """
        content = {
            "episode_id": self.episode_id,
            "seed": self.seed,
            "actions": [[actor.step_key, actor.agent_id, _plain(action)] for actor, action in self.actions],
        }
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.episode_id}.json"
        write_whole(path, seal_json(json.dumps(content).encode()))
        return path

    @classmethod
    def load(cls, path: Path | str) -> ActionRecord:
        """Reads what :meth:`save` wrote.

        :raises CheckpointError: The file cannot be read, or is no record of actions.
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
                f"{path} is no record of actions, or a damaged one ({type(error).__name__}: {error}). Rollouts with "
                f"runner.record_actions=true write them."
            ) from error
        return record


def plain_seed(seed: Any) -> int | None:
    """A seed that can be written down; `None`: it is no whole number."""
    return int(seed) if isinstance(seed, (int, np.integer)) else None


def _plain(action: Any) -> dict[str, list[Any]]:
    named = action if isinstance(action, Mapping) else {_SINGLE_ACTION: action}
    plain = {}
    for name, value in named.items():
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise EnvironmentContractError(
                f"Action `{name}` cannot be recorded: expected numbers or arrays, got {type(value).__name__}."
            )
        plain[str(name)] = [array.dtype.str, array.tolist()]
    return plain


def _restored(plain: Mapping[str, list[Any]]) -> Any:
    action = {name: np.asarray(value, dtype=_checked(dtype))[()] for name, (dtype, value) in plain.items()}
    return action[_SINGLE_ACTION] if list(action) == [_SINGLE_ACTION] else action


def _checked(dtype: Any) -> np.dtype[Any]:
    found: np.dtype[Any] = np.dtype(str(dtype))
    if found.hasobject or found.itemsize > _MAX_ITEM_SIZE:
        raise ValueError(f"values of type {dtype}")
    return found
