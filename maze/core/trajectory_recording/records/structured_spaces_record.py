"""Record of one environment step: the records of its sub-steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord

if TYPE_CHECKING:
    from maze.core.env.maze_env import MazeEnv
    from maze.core.log_events.step_event_log import StepEventLog
    from maze.core.log_stats.log_stats import LogStats
    from maze.core.trajectory_recording.records.state_record import StateRecord


def _in_order(name: str, doc: str) -> property:
    """Return a property of a field of all sub-steps, in order."""
    return property(lambda self: self._list(name), doc=doc)


def _by_step_key(name: str, doc: str) -> property:
    """Return a property of a field of all sub-steps, by sub-step key."""
    return property(lambda self: self._dict(name), doc=doc)


@dataclass
class StructuredSpacesRecord:
    """The spaces records of the sub-steps of one environment step, in the order in which the actors acted.

    :param substep_records: The records; `None`: none so far.
    :param event_log: Events of the step; `None`: they were not recorded.
    :param step_stats: Statistics of the step; `None`: they were not recorded.
    :param episode_stats: Statistics of the episode, at its last step; `None`: it goes on, or they were not recorded.
    """

    substep_records: list[SpacesRecord] = field(default_factory=list)
    event_log: StepEventLog | None = None
    step_stats: LogStats | None = None
    episode_stats: LogStats | None = None

    def __post_init__(self) -> None:
        # `None` is accepted for a record that is filled later
        self.substep_records = self.substep_records or []

    def append(self, substep_record: SpacesRecord) -> None:
        """Add the record of the next sub-step."""
        self.substep_records.append(substep_record)

    @classmethod
    def stack_records(cls, records: Sequence[StructuredSpacesRecord]) -> StructuredSpacesRecord:
        """Stack records with the same sequence of actors, sub-step by sub-step, along a new first dimension.

        :param records: At least one record.
        :raises ValueError: There are none, or their actors differ.
        """
        if not records:
            raise ValueError("There are no records to stack.")
        actors = records[0].actor_ids
        for index, record in enumerate(records):
            if record.actor_ids != actors:
                raise ValueError(
                    f"Only records with the same sequence of actors can be stacked: record 0 has {actors}, record "
                    f"{index} has {record.actor_ids}."
                )
        return cls([SpacesRecord.stack([record.substep_records[i] for record in records]) for i in range(len(actors))])

    @classmethod
    def converted_from(
        cls, state_record: StateRecord, conversion_env: MazeEnv[Any], first_step_in_episode: bool
    ) -> StructuredSpacesRecord:
        """Convert state and maze action, of each sub-step, with the conversions and wrappers of an environment.

        :param state_record: The recorded maze state and maze action.
        :param conversion_env: Environment with the conversions and wrappers.
        :param first_step_in_episode: Whether this is the first step, for wrappers with an internal state.
        :raises EnvironmentContractError: The environment has no such sub-step.
        """
        records: list[SpacesRecord] = []
        for substep in state_record.by_substep():
            actor, is_first = substep.actor_id, first_step_in_episode and not records
            with nullcontext() if actor is None else conversion_env.converting(actor):
                observations, actions = conversion_env.get_observation_and_action_dicts(
                    substep.maze_state, substep.maze_action, is_first
                )
            found = [  # several if wrappers split an action into sub-steps
                SpacesRecord(
                    actor_id=actor if actor is not None and key == actor.step_key else ActorID(key, 0),
                    observation=observations[key] if observations is not None else None,
                    action=actions[key] if actions is not None else None,
                    reward=0.0,
                    done=False,
                )
                for key in (observations if observations is not None else actions or {})
            ]
            if found:  # the reward belongs to the last of them
                found[-1].reward, found[-1].done, found[-1].info = substep.reward, substep.done, substep.info
            records += found
        return cls(records, event_log=state_record.step_event_log)

    def to_numpy(self) -> StructuredSpacesRecord:
        """Convert all sub-step records to NumPy, in place.

        :return: This record.
        """
        for record in self.substep_records:
            record.to_numpy()
        return self

    def to_torch(self, device: str) -> StructuredSpacesRecord:
        """Convert all sub-step records to tensors, in place.

        :param device: Device of the tensors.
        :return: This record.
        """
        for record in self.substep_records:
            record.to_torch(device)
        return self

    def is_batched(self) -> bool:
        """Return whether the records hold batches."""
        return self.batch_shape is not None

    @property
    def batch_shape(self) -> list[int] | None:
        """Leading dimensions of all arrays; `None`: one unbatched step."""
        return self.substep_records[0].batch_shape if self.substep_records else None

    def is_done(self) -> bool:
        """Return whether the episode ended with this step; for unbatched records only.

        :raises ValueError: The record is a batch.
        """
        if self.is_batched():
            raise ValueError("A batched record has no single done flag; use `dones` instead.")
        return bool(self.substep_records) and bool(self.substep_records[-1].done)

    def _list(self, name: str) -> list[Any]:
        return [getattr(record, name) for record in self.substep_records]

    def _dict(self, name: str) -> dict[StepKeyType, Any]:
        result = {record.substep_key: getattr(record, name) for record in self.substep_records}
        if len(result) < len(self.substep_records):
            raise ValueError(
                f"Several of the actors {self.actor_ids} share a sub-step key; a dictionary by sub-step key would lose "
                f"all but the last of them. Use the lists (`{name}s`) with `actor_ids` instead."
            )
        return result

    @property
    def actor_ids(self) -> list[ActorID]:
        """The actors, in order."""
        return self._list("actor_id")

    @property
    def substep_keys(self) -> list[StepKeyType]:
        """Sub-step keys, in order."""
        return self._list("substep_key")

    actions = _in_order("action", "Actions of all sub-steps.")
    observations = _in_order("observation", "Observations of all sub-steps.")
    rewards = _in_order("reward", "Rewards of all sub-steps.")
    dones = _in_order("done", "Done flags of all sub-steps.")
    infos = _in_order("info", "Infos of all sub-steps.")
    next_observations = _in_order("next_observation", "Next observations of all sub-steps.")
    logits = _in_order("logits", "Logits of all sub-steps.")
    discounted_returns = _in_order("discounted_return", "Discounted returns of all sub-steps.")
    actions_dict = _by_step_key("action", "Actions by sub-step key.")
    observations_dict = _by_step_key("observation", "Observations by sub-step key.")
    rewards_dict = _by_step_key("reward", "Rewards by sub-step key.")
    dones_dict = _by_step_key("done", "Done flags by sub-step key.")
    next_observations_dict = _by_step_key("next_observation", "Next observations by sub-step key.")
    logits_dict = _by_step_key("logits", "Logits by sub-step key.")
    discounted_returns_dict = _by_step_key("discounted_return", "Discounted returns by sub-step key.")
