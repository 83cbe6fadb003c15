"""Recording of the agent's actions."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from maze.core.annotations import override
from maze.core.env.maze_env import MazeEnv
from maze.core.trajectory_recording.records.action_record import ActionRecord, plain_seed
from maze.core.wrappers.wrapper import Wrapper


class ActionRecordingWrapper(Wrapper[MazeEnv[Any]]):
    """Writes the seed and the actions of each episode into a file, from which the episode can be run again.

    `ReplayRecordedActionsPolicy` takes the actions once more. That gives the same episode in an environment whose
    randomness comes from its seed alone. An episode is written when the next one begins, unless it was cloned from
    another environment.

    :param env: The environment, with all wrappers that the agent acts through.
    :param output_dir: Directory of the files.
    """

    keeps_observations_and_actions = True

    def __init__(self, env: MazeEnv[Any], output_dir: str | Path = "action_records") -> None:
        self.output_dir = Path(output_dir)
        self.episode_record: ActionRecord | None = None
        """The episode in progress."""
        self._next_seed: int | None = None
        super().__init__(env)

    def seed(self, seed: Any) -> None:
        """Seeds the environment, and remembers the seed for the coming episode."""
        self._next_seed = plain_seed(seed)
        self.env.seed(seed)

    @override(Wrapper)
    def step(self, action: Any) -> Any:
        if self.episode_record is not None:
            self.episode_record.append(self.env.actor_id(), copy.deepcopy(action))
        return self._env_step(action)

    @override(Wrapper)
    def reset(self) -> Any:
        if self.episode_record is not None and len(self.episode_record) and not self.env.context.is_copied:
            self.episode_record.save(self.output_dir)
        self.episode_record = None
        observation = self._env_reset()
        self.episode_record = ActionRecord(self.env.get_episode_id(), self._next_seed)
        self._next_seed = None
        return observation

    @override(Wrapper)
    def clone_from(self, env: ActionRecordingWrapper) -> None:
        """Takes over the state, and the recording up to here."""
        super().clone_from(env)
        self._next_seed = env._next_seed
        self.episode_record = None if env.episode_record is None else env.episode_record.copy()
