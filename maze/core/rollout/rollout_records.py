"""Rollouts as records, for users and recordings: in a single environment, and of the columns of vector environments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from maze.core.agent.policy import Policy, acting_in
from maze.core.env.structured_env import ActorID
from maze.core.log_stats.log_stats import LogStatsLevel
from maze.core.rollout.rollout_columns import LogitsShapes, RolloutColumns, SubstepColumns, has_known_reward
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.trajectory_recording.records.trajectory_record import SpacesTrajectoryRecord

_ChoosingFunction = Callable[[Any, ActorID, SpacesRecord], Any]


@dataclass
class SingleEnvRollouts:
    """Roll out policies in a single environment; each rollout continues where the previous one ended.

    The parameters are those of :class:`~maze.core.rollout.rollout_generator.RolloutGenerator`.
    """

    env: Any
    record_step_stats: bool
    record_episode_stats: bool
    record_next_observations: bool
    terminate_on_done: bool
    observation: Any = None
    """Observation of the next action; `None`: the next rollout begins with a reset."""

    def __post_init__(self) -> None:
        if self.record_step_stats:
            self.env.get_stats(LogStatsLevel.STEP)  # from now on they are calculated

    def rollout(
        self, policy: Policy, logits_shapes: LogitsShapes | None, n_steps: int | None, trajectory_id: Any | None
    ) -> SpacesTrajectoryRecord:
        """Roll out a policy.

        :param policy: The policy.
        :param logits_shapes: Shapes of its logits; `None`: they are not recorded.
        :param n_steps: Number of environment steps; `None`: to the end of the episode.
        :param trajectory_id: Id of the record; `None`: that of the episode.
        """
        if self.observation is None:
            self.observation = self.env.reset()
        trajectory = SpacesTrajectoryRecord(self.env.get_episode_id() if trajectory_id is None else trajectory_id)
        choose, is_over = _choosing_function(self.env, policy, logits_shapes), False
        while not is_over and (n_steps is None or len(trajectory) < n_steps):
            trajectory.append(StructuredSpacesRecord())
            is_over = self._take_step(choose, trajectory) and self.terminate_on_done
        return trajectory

    def _take_step(self, choose: _ChoosingFunction, trajectory: SpacesTrajectoryRecord) -> bool:
        """Take one environment step in a single environment: sub-steps until it is complete.

        :param trajectory: Its last record is the one of this step.
        :return: Whether the episode is over; the next one has then begun.
        """
        step_record = trajectory.step_records[-1]
        env = self.env
        done = False
        while not (done or (step_record.substep_records and env.context.is_step_complete)):
            actor, observation = env.actor_id(), self.observation
            record = SpacesRecord(actor, observation=_copied(observation))
            action = choose(observation, actor, record)
            record.action = _copied(action)
            self.observation, record.reward, done, record.info = env.step(action)
            record.done = done
            if self.record_next_observations:
                record.next_observation = _copied(self.observation)
            step_record.append(record)
        own_rewards = env.get_actor_rewards()
        if own_rewards is not None:
            _share_out(own_rewards, trajectory)
        if self.record_step_stats:
            step_record.step_stats = dict(env.get_stats(LogStatsLevel.STEP).last_stats)
        if done:
            self.observation = env.reset()  # publishes the statistics of the episode
            if self.record_episode_stats:
                step_record.episode_stats = dict(env.get_stats(LogStatsLevel.EPISODE).last_stats)
        return done


def _choosing_function(env: Any, policy: Policy, logits_shapes: LogitsShapes | None) -> _ChoosingFunction:
    """Return a function that computes an action, and records the logits if their shapes are given."""
    if logits_shapes is None:
        act = acting_in(env, policy)
        return lambda observation, actor, record: act(observation, actor)
    compute_action: Any = policy.compute_action  # of a TorchPolicy

    def choose(observation: Any, actor: ActorID, record: SpacesRecord) -> Any:
        logits = {key: np.zeros((1, *shape), np.float32) for key, shape in logits_shapes[actor.step_key].items()}
        if policy.is_recurrent:  # its hidden states are kept by environment
            action = compute_action(observation, env=env, actor_id=actor, logits_out=logits)
        else:
            batch = {key: np.asarray(value)[np.newaxis] for key, value in observation.items()}
            actions = policy.compute_actions(batch, actor, logits_out=logits)  # type: ignore[attr-defined]
            action = {key: value[0] for key, value in actions.items()}
        record.logits = {key: value[0] for key, value in logits.items()}
        return action

    return choose


def _copied(values: Any) -> Any:
    """Copy arrays, which environments may reuse."""
    return {key: np.array(value) if isinstance(value, np.ndarray) else value for key, value in values.items()}


def _share_out(own_rewards: np.ndarray, trajectory: SpacesTrajectoryRecord) -> None:
    """Set the per-actor rewards of the last step, and add to those of earlier sub-steps."""
    of_step = trajectory.step_records[-1].substep_records
    for record in of_step:
        record.reward = 0.0
    records = of_step
    if len(own_rewards) > len(of_step):
        records = [record for step in trajectory.step_records for record in step.substep_records]
    for record, reward in zip(reversed(records), reversed(own_rewards), strict=False):
        record.reward = float(record.reward or 0.0) + float(reward)


def record_of(columns: RolloutColumns, with_next_observations: bool = False, id: Any = None) -> SpacesTrajectoryRecord:
    """Return a rollout as a record: one batched structured record per environment step, with views of the columns.

    Where actors differ between environments there is one structured record per tick, with one spaces record for
    each actor; its `info` has the environments (`env_indices`).

    :param columns: The rollout.
    :param with_next_observations: Whether to fill in `next_observation` (these are copies).
    :param id: Id of the trajectory.
    """
    trajectory = SpacesTrajectoryRecord(id)
    rewards = columns.rewards
    if columns.actor_rewards is not None:
        rewards = np.where(has_known_reward(columns.step_complete), columns.actor_rewards, rewards)
    next_row = dict.fromkeys(columns.substeps, 0)
    length = len(columns.actor_sequence) if columns.actor_sequence else 1
    step_record = StructuredSpacesRecord()
    for tick in range(columns.n_ticks):
        if tick % length == 0:
            step_record = StructuredSpacesRecord()
            trajectory.append(step_record)
        for key, substep in columns.substeps.items():
            row = next_row[key]
            if row < substep.n_rows and substep.ticks[row] == tick:
                next_row[key] += 1
                for record in _records_of_row(columns, substep, row, tick, rewards):
                    step_record.append(record)
    if with_next_observations:
        _add_next_observations(columns, trajectory)
    return trajectory


def _records_of_row(
    columns: RolloutColumns, substep: SubstepColumns, row: int, tick: int, rewards: np.ndarray
) -> list[SpacesRecord]:
    infos: Any = columns.infos[tick] if columns.infos else None
    if columns.actor_sequence is not None:
        groups: list[Any] = [(columns.actor_sequence[tick % len(columns.actor_sequence)], slice(None), infos)]
    else:
        assert substep.valid is not None
        agents, groups = substep.agent_ids[row], []
        for agent_id in np.unique(agents[substep.valid[row]]).tolist():
            envs = np.flatnonzero(substep.valid[row] & (agents == agent_id))
            of_envs = {} if infos is None else {"infos": [infos[index] for index in envs]}
            groups.append((ActorID(substep.step_key, agent_id), envs, {"env_indices": envs, **of_envs}))
    records = []
    for actor, envs, info in groups:
        observation, action, logits = (
            {key: array[row, envs] for key, array in arrays.items()}
            for arrays in (substep.observations, substep.actions, substep.logits or {})
        )
        reward, done = rewards[tick, envs], columns.terminated[tick, envs] | columns.truncated[tick, envs]
        records.append(
            SpacesRecord(
                actor, observation, action, reward, done, info, logits=logits or None, batch_shape=[len(reward)]
            )
        )
    return records


def _add_next_observations(columns: RolloutColumns, trajectory: SpacesTrajectoryRecord) -> None:
    ends, sequence = (*columns.final_observations, *columns.terminal_observations), columns.actor_sequence
    if sequence is None or any(
        end.actor_id.step_key != sequence[(end.tick + 1) % len(sequence)].step_key for end in ends
    ):
        raise ValueError(
            "Next observations can only be recorded where all environments are at the same actor. Use `collect` "
            "and the columns' `final_observations`."
        )
    records = [record for step in trajectory.step_records for record in step.substep_records]
    last: Any = columns.last_observations[columns.last_actor_ids[0].step_key]
    for record, following in zip(records, [*(record.observation for record in records[1:]), last], strict=True):
        record.next_observation = {key: array.copy() for key, array in following.items()}
    for end in ends:
        own: Any = records[end.tick].next_observation
        for key, value in end.observation.items():
            own[key][end.env_index] = value
