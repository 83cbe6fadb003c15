"""Recording of episodes as states and actions of the simulation."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium

from maze.core.annotations import override
from maze.core.env.maze_env import MazeEnv
from maze.core.env.maze_state import MazeStateType
from maze.core.env.simulated_env_mixin import Future
from maze.core.env.structured_env import ActorID
from maze.core.events.event_collection import EventCollection
from maze.core.log_events.step_event_log import StepEventLog
from maze.core.rendering.renderer import Renderer, renderer_of
from maze.core.trajectory_recording.records.action_record import ActionRecord, plain_seed
from maze.core.trajectory_recording.records.state_record import StateRecord
from maze.core.trajectory_recording.records.trajectory_record import StateTrajectoryRecord
from maze.core.trajectory_recording.writers.trajectory_writer_registry import TrajectoryWriterRegistry
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv, GymRenderer
from maze.core.wrappers.wrapper import PassiveWrapper, Wrapper


class TrajectoryRecordingWrapper(PassiveWrapper[MazeEnv[Any]]):
    """Record the states, actions and events of each episode for the registered trajectory writers.

    One record per environment step, containing a record of each sub-step if the simulation has sub-steps, and a last
    one, without action, for the final state. The seed and the agent's actions are stored as well, so that the episode
    can be replayed. An episode is passed to the writers when the next one begins, unless it was cloned from another
    environment.

    :param env: Environment to record.
    """

    def __init__(self, env: gymnasium.Env[Any, Any] | MazeEnv[Any]) -> None:
        if not isinstance(env, MazeEnv):
            env = GymMazeEnv(env)
        super().__init__(env)
        self.episode_record: StateTrajectoryRecord | None = None
        """The episode in progress."""
        self._state: MazeStateType | None = None
        self._components: dict[str, Any] = {}
        self._reward: Any = 0.0
        self._has_actors = False
        # The sub-steps so far of the environment step in progress, if the simulation has several actors.
        self._substeps: list[StateRecord] = []
        # The next actor and its state.
        self._next: tuple[ActorID | None, MazeStateType | None] = (None, None)
        self._next_seed: int | None = None

    def seed(self, seed: Any) -> None:
        """Seed the environment, and store the seed for the next episode."""
        self._next_seed = plain_seed(seed)
        self.env.seed(seed)

    def step(self, action: Any) -> tuple[Any, Any, bool, dict[Any, Any]]:
        """Take one (sub-)step; it is recorded when the environment step is complete."""
        env = self.env
        env.context.pre_step()  # also for sub-steps that a wrapper answers without stepping the environment
        n_taken = env.context.n_substeps
        if self.episode_record is not None and self.episode_record.action_record is not None:
            self.episode_record.action_record.append(env.actor_id(), copy.deepcopy(action))
        observation, reward, done, info = env.step(action)
        self._reward = self._reward + reward
        if self._has_actors:
            # A wrapper may have answered without the simulation.
            if env.context.n_substeps > n_taken:
                maze_action = copy.deepcopy(env.get_maze_action())
                self._substeps.append(StateRecord(self._next[1], maze_action, None, 0.0, False, {}, {}, self._next[0]))
                if not env.context.is_step_complete:
                    self._next = self._next_actor(), copy.deepcopy(env.get_maze_state())
            if self._substeps:
                last = self._substeps[-1]
                last.reward, last.done, last.info = last.reward + reward, done, dict(info)
        if self.episode_record is not None and (done or env.context.is_step_complete):
            self._record_step(done, info)
        return observation, reward, done, info

    def reset(self) -> Any:
        """Pass the episode in progress to the writers and begin the next one."""
        self.publish_trajectory()
        observation = self.env.reset()
        counts: Any = self.env.core_env.agent_counts_dict  # of the simulation itself, without wrappers
        counts = counts() if callable(counts) else counts
        self._has_actors = counts is not None and list(counts.values()) != [1]
        self.episode_record = StateTrajectoryRecord(self.env.get_episode_id(), renderer=self._renderer())
        self.episode_record.action_record = ActionRecord(self.episode_record.id, self._next_seed)
        self._next_seed = None
        self._take_snapshot()
        return observation

    def publish_trajectory(self) -> None:
        """Pass the episode in progress to the writers, if it has any steps and was not cloned from another environment.

        Its further steps are not recorded.
        """
        record, self.episode_record = self.episode_record, None
        if record is None or not record.step_records or self.env.context.is_copied:
            return
        env_time = record.step_records[-1].env_time
        events = StepEventLog(0 if env_time is None else env_time + 1)
        actor = self._substeps[0].actor_id if self._substeps else self._next[0]
        record.append(StateRecord(self._state, None, events, None, None, None, self._components, actor))
        TrajectoryWriterRegistry.record_trajectory_data(record)

    def render(self, interactive: bool = False, **kwargs: Any) -> None:
        """Draw the last completed step, or browse the episode so far.

        :param interactive: Whether to browse the steps with the keyboard.
        :param kwargs: Further arguments of the renderer.
        :raises ValueError: No step was recorded yet.
        """
        if self.episode_record is None or not self.episode_record.step_records:
            raise ValueError("There is no recorded step to draw; reset the environment and take a step.")
        renderer = renderer_of(self.env)
        steps = self.episode_record.step_records
        if interactive:
            from maze.core.rendering.keyboard_controlled_trajectory_viewer import (  # type: ignore[import-not-found,unused-ignore]
                KeyboardControlledTrajectoryViewer,
            )

            KeyboardControlledTrajectoryViewer(
                self.episode_record, renderer, initial_step_index=-1, renderer_kwargs=kwargs
            ).render()
            return
        last = steps[-1].by_substep()[-1]
        assert last.step_event_log is not None
        renderer.render(last.maze_state, last.maze_action, last.step_event_log, **kwargs)

    @override(Wrapper)
    def clone_from(self, env: TrajectoryRecordingWrapper, future: Future = "same") -> None:
        """Take over the state, and the recording up to here."""
        super().clone_from(env, future)
        self.episode_record = None
        if env.episode_record is not None:
            self.episode_record = StateTrajectoryRecord(env.episode_record.id, renderer=self._renderer())
            self.episode_record.extend(env.episode_record)
            self.episode_record.action_record = copy.copy(env.episode_record.action_record)
        self._state, self._components, self._reward = env._state, env._components, env._reward
        self._has_actors, self._next, self._next_seed = env._has_actors, env._next, env._next_seed
        self._substeps = [copy.copy(substep) for substep in env._substeps]

    def _renderer(self) -> Renderer | None:
        """Return the renderer to store; that of gymnasium needs the live environment, which cannot be recorded."""
        renderer = self.env.get_renderer()
        return None if isinstance(renderer, GymRenderer) else renderer

    def _record_step(self, done: bool, info: dict[Any, Any]) -> None:
        assert self.episode_record is not None
        env = self.env
        events = StepEventLog(env.get_env_time() - 1, EventCollection(env.get_step_events()))
        substeps, actor, maze_action = self._substeps, None, None
        if substeps:
            actor, maze_action = substeps[0].actor_id, substeps[-1].maze_action
            for substep in substeps:
                substep.step_event_log = events if substep is substeps[-1] else StepEventLog(events.env_time)
        else:
            maze_action = copy.deepcopy(env.get_maze_action())
        of_step = self._reward, done, dict(info), self._components, actor, substeps if len(substeps) > 1 else ()
        self.episode_record.append(StateRecord(self._state, maze_action, events, *of_step))
        self._take_snapshot()

    def _take_snapshot(self) -> None:
        """Copy the state in which the next environment step begins; the environment may modify its own."""
        self._reward = 0.0
        self._state = copy.deepcopy(self.env.get_maze_state())
        self._components = copy.deepcopy(self.env.core_env.get_serializable_components())
        self._substeps = []
        self._next = self._next_actor(), self._state

    def _next_actor(self) -> ActorID | None:
        return ActorID(*self.env.core_env.actor_id()) if self._has_actors else None
