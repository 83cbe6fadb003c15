"""Rollouts of policies in environments and vector environments: in columns, and as records for users and recordings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from maze.core.agent.policy import HiddenStates, Policy, acting_in
from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import ACTORS_DONE_KEY, ActorID
from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel, LogStatsValue
from maze.core.log_stats.log_stats_env import LogStatsEnv
from maze.core.rollout.batched_acting import act_by_actor, acting_function, logits_shapes_of
from maze.core.rollout.rollout_columns import (
    FinalObservationEntry,
    InitialHiddenStates,
    LogitsShapes,
    RolloutColumns,
    SubstepColumns,
    has_known_reward,
)
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.trajectory_recording.records.trajectory_record import SpacesTrajectoryRecord
from maze.core.utils.update_profile import COLLECTING, timed
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper


class RolloutGenerator:
    """Roll out policies in an environment or vector environment.

    Each rollout continues where the previous one ended. The next episode begins at once when one ends. Where an
    environment reports per-actor rewards (`get_actor_rewards`), records hold these.

    :param env: Environment, or vector environment.
    :param record_logits: Whether to record the logits of the policy.
    :param record_step_stats: Whether to record the statistics of each step (not with vector environments).
    :param record_episode_stats: Whether to record the statistics of an episode with its last step (likewise).
    :param record_next_observations: Whether to record the observation that followed each action.
    :param terminate_on_done: Whether a rollout ends when the episode does (not with vector environments).
    :raises ValueError: An option does not fit a vector environment.
    """

    def __init__(
        self,
        env: MazeEnv[Any] | Any,
        record_logits: bool = False,
        record_step_stats: bool = False,
        record_episode_stats: bool = False,
        record_next_observations: bool = False,
        terminate_on_done: bool = False,
    ) -> None:
        self.is_vectorized = hasattr(env, "n_envs")
        if self.is_vectorized and (record_step_stats or record_episode_stats or terminate_on_done):
            raise ValueError(
                "`record_step_stats`, `record_episode_stats` and `terminate_on_done` belong to a single environment; "
                "the environments of a vector environment start their episodes independently of one another."
            )
        self.env: Any = env
        if not self.is_vectorized and not isinstance(env, LogStatsEnv):
            self.env = LogStatsWrapper.wrap(env)
        self.record_logits = record_logits
        self.record_next_observations = record_next_observations
        self.terminate_on_done = terminate_on_done
        self._records_step_stats, self._records_episode_stats = record_step_stats, record_episode_stats
        if record_step_stats:
            self.env.get_stats(LogStatsLevel.STEP)  # from now on they are calculated
        if self.is_vectorized and record_next_observations:
            self.env.keep_terminal_observations = True
        # Observation of the next action, in vector environments by sub-step key; None: the next rollout begins with a
        # reset.
        self._last_observation: Any = None
        # Environments that begin new episodes with the next rollout.
        self._renewed: list[int] = list(range(env.n_envs)) if self.is_vectorized else []
        # Hidden states of a recurrent policy.
        self._hidden_states: HiddenStates | None = None
        # Hidden states at the begin of the next rollout, if it resumes an earlier run.
        self._saved_hidden_states: Mapping[str, Any] | None = None

    def get_epoch_stats_aggregator(self) -> LogStatsAggregator:
        """Return the epoch statistics of the environment."""
        aggregator: LogStatsAggregator = self.env.get_stats(LogStatsLevel.EPOCH)
        return aggregator

    def get_stats_value(
        self, event: Callable[..., Any], level: LogStatsLevel, name: str | None = None
    ) -> LogStatsValue:
        """Return one value of the last statistics of the environment.

        :param event: Interface method of the event.
        :param level: Level of the statistics; a vector environment has those of epochs only.
        :param name: Output name of the statistic.
        :raises KeyError: There is no such statistic.
        """
        value: LogStatsValue = self.env.get_stats_value(event, level, name)
        return value

    def reset(self) -> None:
        """Begin the next rollout with new episodes; required after any other use of the environment."""
        self._last_observation = None
        if self.is_vectorized:
            self._renewed = list(range(self.env.n_envs))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a vector environment, where the next rollout continues; not for single environments."""
        state: dict[str, Any] = {**self.env.state_dict(), "renewed": list(self._renewed)}
        if self._hidden_states is not None and self._last_observation is not None:
            state["memory"] = {"begins": self._has_begun(), **self._hidden_states.state_dict()}
        elif self._saved_hidden_states is not None:
            state["memory"] = self._saved_hidden_states
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        """Continue from a state that :meth:`state_dict` returned; only for vector environments.

        :param state_dict: The state, possibly of another number of environments. Its hidden states are not copied.
        :return: Why environments begin new episodes instead, by their index.
        """
        problems: dict[int, str] = self.env.load_state_dict(state_dict)
        self.reset()
        self._renewed = sorted({*state_dict.get("renewed", ()), *problems})
        saved = state_dict.get("memory")
        if saved is not None and len(saved["begins"]) == self.env.n_envs:
            saved["begins"][list(problems)] = True
            self._saved_hidden_states = saved
        return problems

    def rollout(self, policy: Policy, n_steps: int | None, trajectory_id: Any | None = None) -> SpacesTrajectoryRecord:
        """Roll out a policy.

        :param policy: The policy.
        :param n_steps: Number of environment steps; None: to the end of the episode (with `terminate_on_done`). With
            vector environments each takes this many, on average where their steps differ in their sub-steps.
        :param trajectory_id: Id of the record; by default the episode id, with vector environments None.
        :return: One structured record per environment step; with vector environments batched ones.
        :raises ValueError: The rollout has no end.
        """
        if n_steps is None and not self.terminate_on_done:
            raise ValueError("Without `terminate_on_done` a rollout has no end: pass `n_steps`.")
        if self.is_vectorized and n_steps is not None:
            columns = self.allocate(n_steps, policy)
            columns.infos = []
            self.collect(policy, columns)
            return record_of(columns, with_next_observations=self.record_next_observations, id=trajectory_id)
        if self._last_observation is None:
            self._last_observation = self.env.reset()
        trajectory = SpacesTrajectoryRecord(self.env.get_episode_id() if trajectory_id is None else trajectory_id)
        self._logits_shapes(policy)  # checks that there are logits to record
        act, is_over = acting_in(self.env, policy), False
        while not is_over and (n_steps is None or len(trajectory) < n_steps):
            trajectory.append(StructuredSpacesRecord())
            is_over = self._take_step(policy, act, trajectory) and self.terminate_on_done
        return trajectory

    def allocate(self, n_steps: int, policy: Policy | None = None) -> RolloutColumns:
        """Return columns for :meth:`collect`.

        :param n_steps: Number of environment steps of each environment; where their steps differ in their sub-steps,
            on average.
        :param policy: The policy, needed to know the shapes of logits where they are recorded.
        """
        return RolloutColumns.for_env(self.env, n_steps, self._logits_shapes(policy))

    @timed(COLLECTING)
    def collect(self, policy: Policy, columns: RolloutColumns) -> RolloutColumns:
        """Fill columns with a rollout in a vector environment; earlier contents are overwritten.

        :param policy: The policy; evaluated once per tick and actor where it has `compute_actions`.
        :param columns: Columns made for this environment.
        :return: The same columns.
        """
        if getattr(self.env, "acts", False):
            if getattr(policy, "is_recurrent", False):
                raise ConfigError(
                    "model: a recurrent policy cannot collect rollouts in environments that contain their own copy of "
                    "the policy. Use runner.env_groups=1 with runner=dev or runner=local."
                )
            self.env.roll_out(policy, columns, begins=self._last_observation is None)
            self._last_observation = columns.last_observations
        else:
            columns.clear()
            rows = columns.next_rows()
            if self._last_observation is None:
                self.env.reset(out=rows)
            else:
                for step_key, arrays in self._last_observation.items():
                    for key, array in arrays.items():
                        rows[step_key][key][...] = array
            hidden_states = self._remembered(policy, columns) if getattr(policy, "is_recurrent", False) else None
            act = acting_function(policy, self.env, hidden_states=hidden_states)
            actors = self._collect_flat(act, columns) if self.env.is_flat else self._collect_structured(act, columns)
            columns.finish(self.env.actor_ids(), actors)
            # A copy: changes of the columns must not change where the next rollout starts.
            rows = columns.next_rows()
            self._last_observation = {key: {name: row.copy() for name, row in rows[key].items()} for key in rows}
        # Which environments do not continue the previous rollout.
        columns.renewed = sorted({*columns.renewed, *self._renewed}.intersection(range(columns.n_envs)))
        self._renewed = []
        return columns

    def _remembered(self, policy: Any, columns: RolloutColumns) -> HiddenStates:
        """Return the hidden states of a recurrent policy before the first tick; the columns get a copy."""
        begins = np.ones(self.env.n_envs, np.bool_) if self._last_observation is None else self._has_begun()
        if self._hidden_states is None:
            self._hidden_states = HiddenStates(self.env.n_envs, policy.state_sizes)
        if self._saved_hidden_states is not None:
            begins = self._saved_hidden_states["begins"]
            self._hidden_states.load_state_dict(self._saved_hidden_states)
            self._saved_hidden_states = None
        self._hidden_states.reset(begins)
        columns.hidden_states = InitialHiddenStates(begins, self._hidden_states.copied())
        return self._hidden_states

    def _has_begun(self) -> np.ndarray:
        """Return which environments have begun an episode with the latest step, bool `[n_envs]`."""
        return np.asarray(self.env.terminated | self.env.truncated)

    def _collect_flat(self, act: Any, columns: RolloutColumns) -> list[ActorID | None]:
        """Collect where the same actor always acts: one row per tick."""
        env = self.env
        actor = env.actor_ids()[0]
        substep = columns.substeps[actor.step_key]
        step, step_key, n_envs = env.step, actor.step_key, columns.n_envs
        out = {step_key: substep.observation_rows[0]}
        pauses: dict[int, np.ndarray] = {}
        is_constrained = bool(columns.constrained.size)
        n_ticks = n_completed = 0
        while (end := columns.ticks_to_take(n_ticks, n_completed)) > n_ticks:
            # making room for more ticks replaces the rows
            seen, actions_of, logits_of = substep.observation_rows, substep.action_rows, substep.logits_rows
            rewards, terminated, truncated = columns.rewards, columns.terminated, columns.truncated
            first, n_ticks = n_ticks, end
            for tick in range(first, n_ticks):
                actions = actions_of[tick]
                act(seen[tick], actor, actions, logits_of[tick], None)
                out[step_key] = seen[tick + 1]
                if (pending := env.autoreset_pending) is not None:
                    pauses[tick] = pending
                    n_completed -= len(pending)
                _, _, _, infos = step(actions, out)
                rewards[tick] = env.rewards
                terminated[tick] = env.terminated
                truncated[tick] = env.truncated
                if is_constrained:
                    columns.constrained[tick] = env.constrained_values
                if columns.infos is not None:
                    columns.infos.append(infos)
                if env.final_observations:
                    self._note_final_observations(tick, columns)
            n_completed += n_envs * (n_ticks - first)
        columns.step_complete[:] = True
        substep.fill_rows(n_ticks, actor.agent_id, pauses)
        actors: list[ActorID | None] = [actor] * n_ticks
        for paused_tick, pending in pauses.items():
            actors[paused_tick] = None
            columns.step_complete[paused_tick, pending] = False
        return actors

    def _collect_structured(self, act: Any, columns: RolloutColumns) -> list[ActorID | None]:
        env = self.env
        common_actors: list[ActorID | None] = []
        n_completed = 0
        if asks_who_left := -1 in env.agent_counts_dict.values():
            columns.actor_done = np.zeros_like(columns.terminated)
        while columns.ticks_to_take(tick := len(common_actors), n_completed) > tick:
            actors = env.actor_ids()
            common_actors.append(actors[0] if actors.count(actors[0]) == len(actors) else None)
            actions = act_by_actor(act, actors, *columns.take_rows(tick, actors))
            _, _, _, infos = env.step(actions, columns.next_rows())
            columns.rewards[tick] = env.rewards
            columns.terminated[tick] = env.terminated
            columns.truncated[tick] = env.truncated
            columns.constrained[tick] = env.constrained_values
            columns.step_complete[tick] = env.step_complete
            n_completed += np.count_nonzero(env.step_complete)
            if columns.infos is not None:
                columns.infos.append(infos)
            if env.final_observations:
                self._note_final_observations(tick, columns)
            if env.actor_rewards is not None:
                _spread_actor_rewards(env.actor_rewards, tick, columns)
            if asks_who_left and columns.actor_done is not None:
                columns.actor_done[tick] = env.is_actor_done()
                if n_completed and columns.actor_rewards is None:
                    columns.actor_done = None  # without per-actor rewards, actors are not distinguished
            if any(infos):
                _note_actors_done(infos, tick, columns)
        return common_actors

    def _note_final_observations(self, tick: int, columns: RolloutColumns) -> None:
        for env_index, (actor, observation) in self.env.final_observations.items():
            entry = FinalObservationEntry(tick, env_index, actor, observation)
            is_truncated = self.env.truncated[env_index]
            (columns.final_observations if is_truncated else columns.terminal_observations).append(entry)

    def _logits_shapes(self, policy: Policy | None) -> LogitsShapes | None:
        return logits_shapes_of(policy, self.env.action_spaces_dict) if self.record_logits else None

    def _take_step(self, policy: Any, act: Callable[[Any, ActorID], Any], trajectory: SpacesTrajectoryRecord) -> bool:
        """Take one environment step in a single environment: sub-steps until it is complete.

        :param policy: Computes the actions if their logits are recorded.
        :param act: Computes them otherwise.
        :param trajectory: Its last record is the one of this step.
        :return: Whether the episode is over; the next one has then begun.
        """
        step_record = trajectory.step_records[-1]
        env = self.env
        done = False
        while not (done or (step_record.substep_records and env.context.is_step_complete)):
            actor, observation = env.actor_id(), self._last_observation
            record = SpacesRecord(actor, observation=_copied(observation))
            if self.record_logits:
                logits: dict[str, np.ndarray] = {}
                action = policy.compute_action(observation, env=env, actor_id=actor, logits_out=logits)
                record.logits = {key: value[0] for key, value in logits.items()}
            else:
                action = act(observation, actor)
            record.action = _copied(action)
            self._last_observation, record.reward, done, record.info = env.step(action)
            record.done = done
            if self.record_next_observations:
                record.next_observation = _copied(self._last_observation)
            step_record.append(record)
        own_rewards = env.get_actor_rewards()
        if own_rewards is not None:
            _share_out(own_rewards, trajectory)
        if self._records_step_stats:
            step_record.step_stats = dict(env.get_stats(LogStatsLevel.STEP).last_stats)
        if done:
            self._last_observation = env.reset()  # publishes the statistics of the episode
            if self._records_episode_stats:
                step_record.episode_stats = dict(env.get_stats(LogStatsLevel.EPISODE).last_stats)
        return done


def _note_actors_done(infos: Sequence[Mapping[Any, Any]], tick: int, columns: RolloutColumns) -> None:
    """Mark the last ticks of actors that left permanently while others acted, if they are in the rollout."""
    for env_index, info in enumerate(infos):
        for n_ago in (info or {}).get(ACTORS_DONE_KEY, ()):
            if columns.actor_done is None:
                columns.actor_done = np.zeros_like(columns.terminated)
            if n_ago <= tick:
                columns.actor_done[tick - n_ago, env_index] = True


def _spread_actor_rewards(rewards: list[np.ndarray | None], tick: int, columns: RolloutColumns) -> None:
    """Add per-actor rewards to the last ticks of the actors, if they are in the rollout."""
    if columns.actor_rewards is None:
        columns.actor_rewards = np.zeros_like(columns.rewards)
    for env_index, of_actors in enumerate(rewards):
        if of_actors is not None:
            n_ticks = min(len(of_actors), tick + 1)
            columns.actor_rewards[tick + 1 - n_ticks : tick + 1, env_index] += of_actors[len(of_actors) - n_ticks :]


# -- records ----------------------------------------------------------------------------------------------------------


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
