"""Replay recorded episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from maze.core.agent.policy import Policy
from maze.core.annotations import override
from maze.core.env.structured_env import ActorID
from maze.core.errors import CheckpointError, EnvironmentContractError
from maze.core.trajectory_recording.records.trajectory_record import ActionRecord
from maze.core.utils.files import file_stem


class ReplayRecordedActionsPolicy(Policy):
    """Take the actions that were recorded of an episode.

    Episodes are matched by the environment's episode id, which depends on its seed only. A deviation from the record
    (another actor's turn, a longer episode) raises `EnvironmentContractError`.

    :param action_records: Directory of records, or the file of a single one.
    :raises CheckpointError: There are no such records.
    """

    def __init__(self, action_records: str | Path) -> None:
        self.path = Path(action_records).absolute()
        if not self.path.exists():
            raise CheckpointError(
                f"policy.action_records: there is no {self.path}. Rollouts with runner.record_actions=true write such "
                f"a directory; input_dir=<directory of the rollout> finds it."
            )
        self._record: ActionRecord | None = None
        self._position = 0
        self._env_time = 0

    @override(Policy)
    def seed(self, seed: int) -> None:
        """Begin an episode from its start; the seed is ignored."""
        self._record = None

    @override(Policy)
    def needs_env(self) -> bool:
        return True

    @override(Policy)
    def compute_action(
        self,
        observation: Any,
        maze_state: Any = None,
        env: Any = None,
        actor_id: ActorID | None = None,
        deterministic: bool = False,
    ) -> Any:
        env_time = env.get_env_time()
        if env_time < self._env_time:
            self._record = None  # the same episode may be run several times in a row
        self._env_time = env_time
        record, episode_id = self._record, env.get_episode_id()
        if record is None or record.episode_id != episode_id:
            path = self.path / f"{file_stem(episode_id)}.json" if self.path.is_dir() else self.path
            record = ActionRecord.load(path) if path.is_file() else None
            if record is None or record.episode_id != episode_id:
                raise CheckpointError(
                    f"Episode {episode_id} is not among the records in {self.path}. An environment gives its episodes "
                    f"the identities that were recorded if it has the same seed: seeding.env_base_seed, as "
                    f"hydra_config.yaml of the recorded rollout names it, or env.seed(ActionRecord.load(file).seed)."
                )
            self._record, self._position = record, 0
        actor, action = record.actions[self._position] if self._position < len(record) else (None, None)
        if actor is None or actor_id not in (None, actor):
            raise EnvironmentContractError(
                f"Episode {record.episode_id}, action {self._position} of {len(record)} recorded ones: it is the turn "
                f"of {actor_id}, but {actor or 'the end of the episode'} was recorded. Replay it in the environment, "
                "with the wrappers and the step limit, that it was recorded in."
            )
        self._position += 1
        return action
