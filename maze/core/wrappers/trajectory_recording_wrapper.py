"""Wrappers that record episodes: trajectories, actions, frames and tables."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from maze.core.annotations import override
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.maze_env import MazeEnv
from maze.core.env.maze_state import MazeStateType
from maze.core.env.simulated_env_mixin import Future
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.events.event_collection import EventCollection
from maze.core.log_events.step_event_log import StepEventLog
from maze.core.rendering.renderer import RecordedFramesRenderer, Renderer, renderer_of
from maze.core.trajectory_recording.records.spaces_record import PROPENSITY, SpacesRecord
from maze.core.trajectory_recording.records.state_record import StateRecord
from maze.core.trajectory_recording.records.trajectory_record import ActionRecord, StateTrajectoryRecord, plain_seed
from maze.core.trajectory_recording.writers.trajectory_writer_file import ParquetColumns, SubstepRow
from maze.core.trajectory_recording.writers.trajectory_writer_registry import TrajectoryWriterRegistry
from maze.core.utils.config_utils import whole_number
from maze.core.utils.files import file_stem
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv, GymRenderer, latest_picture
from maze.core.wrappers.monitoring_wrapper import base_maze_env
from maze.core.wrappers.wrapper import PassiveWrapper, Wrapper

_LOGGER = logging.getLogger(__name__)

_PICTURE_MODES = ("rgb_array", "rgb_array_list")


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
                last.reward, last.done, last.info = last.reward + reward, done, dict(info or {})
        if self.episode_record is not None and (done or env.context.is_step_complete):
            self._record_step(done, info)
        return observation, reward, done, info

    def reset(self) -> Any:
        """Pass the episode in progress to the writers and begin the next one."""
        self.publish_trajectory()
        observation = self.env.reset()
        # of the simulation itself, without wrappers
        self._has_actors = list(base_maze_env(self.env).agent_counts_dict.values()) != [1]
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
        events = StepEventLog(self.env.get_env_time())
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
        of_step = self._reward, done, dict(info or {}), self._components, actor, substeps if len(substeps) > 1 else ()
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


class ActionRecordingWrapper(PassiveWrapper[MazeEnv[Any]]):
    """Write the seed and the actions of each episode into a file, from which the episode can be replayed.

    `ReplayRecordedActionsPolicy` repeats the actions. The episode is the same if the randomness of the environment
    depends on its seed only. An episode is written when the next one begins, unless it was cloned from another
    environment. If the disk is full, one warning is logged and no more episodes are written.

    :param env: The environment, with all wrappers that the agent acts through.
    :param output_dir: Directory of the files.
    """

    CLONED = ("_next_seed", "episode_record")

    def __init__(self, env: MazeEnv[Any], output_dir: str | Path = "action_records") -> None:
        self.output_dir = Path(output_dir)
        self.episode_record: ActionRecord | None = None
        """The episode in progress."""
        self._next_seed: int | None = None
        self._is_writable = True
        super().__init__(env)

    def seed(self, seed: Any) -> None:
        """Seed the environment, and store the seed for the next episode."""
        self._next_seed = plain_seed(seed)
        self.env.seed(seed)

    @override(Wrapper)
    def step(self, action: Any) -> Any:
        if self.episode_record is not None:
            self.episode_record.append(self.env.actor_id(), copy.deepcopy(action))
        return self._env_step(action)

    @override(Wrapper)
    def reset(self) -> Any:
        record, self.episode_record = self.episode_record, None
        if record is not None and len(record) and self._is_writable and not self.env.context.is_copied:
            try:
                record.save(self.output_dir)
            except OSError as error:
                _LOGGER.warning("Episode %s cannot be written (%s); no more are written.", record.episode_id, error)
                self._is_writable = False
        observation = self._env_reset()
        self.episode_record = ActionRecord(self.env.get_episode_id(), self._next_seed)
        self._next_seed = None
        return observation


def draws_frames_only(env: Any) -> bool:
    """Return whether an environment can only draw its current state, as pictures, and no frames of it are recorded.

    :param env: A Maze environment.
    """
    if not isinstance(env.get_renderer(), GymRenderer):
        return False
    gym_env = env.core_env.env
    if getattr(gym_env, "render_mode", None) in _PICTURE_MODES:
        return True
    return env.core_env.can_be_made_again and "rgb_array" in gym_env.metadata.get("render_modes", [])


def with_frames(env: Any, every_k_steps: int = 1) -> Any:
    """Wrap an environment that can only draw its current state in a :class:`FrameRecordingWrapper`.

    Other environments are returned as they are. If a library for drawing is not installed, episodes are recorded
    without pictures.

    :param env: A Maze environment.
    :param every_k_steps: Record a frame only every so many environment steps.
    """
    return FrameRecordingWrapper.wrap(env, every_k_steps=every_k_steps) if draws_frames_only(env) else env


def can_be_drawn(env: Any) -> bool:
    """Return whether no library for drawing is missing, such as pygame.

    :param env: A Maze environment.
    """
    spec = getattr(getattr(env.core_env, "env", None), "spec", None)
    if spec is None or not draws_frames_only(env):
        return True
    drawn = gymnasium.make(spec, render_mode="rgb_array")
    try:
        drawn.unwrapped.render()
    except Exception as error:  # there is no state to draw before the first reset
        return not isinstance(error, gymnasium.error.DependencyNotInstalled)
    finally:
        drawn.close()
    return True


class FrameRecordingWrapper(PassiveWrapper[MazeEnv[Any]]):
    """Record a frame for each state of an episode, so that recorded trajectories can be viewed.

    gymnasium environments draw their current state only. With this wrapper their renderer shows the frames of the
    episode, and is stored with its trajectory. Without a library for drawing there are no frames. Environments with a
    Maze renderer do not need it: they draw any recorded state.

    :param env: A Maze environment made of a gymnasium one that renders "rgb_array"; one that was made from an id
        without this render mode is made again with it.
    :param every_k_steps: Record a frame only every so many environment steps.
    :raises ConfigError: The environment draws no pictures, or `every_k_steps` is below 1.
    """

    def __init__(self, env: MazeEnv[Any], every_k_steps: int = 1) -> None:
        self.every_k_steps = whole_number("FrameRecordingWrapper.every_k_steps", every_k_steps, at_least=1)
        if not isinstance(env.get_renderer(), GymRenderer):
            raise ConfigError(f"FrameRecordingWrapper: {env!r} needs no frames, its renderer draws recorded states.")
        self._can_draw = True
        self._renderer = RecordedFramesRenderer()
        super().__init__(env)
        if self._gym_env().render_mode not in _PICTURE_MODES:
            self.env.set_render_mode("rgb_array")

    @override(Wrapper)
    def step(self, action: Any) -> tuple[Any, Any, bool, dict[Any, Any]]:
        result: tuple[Any, Any, bool, dict[Any, Any]] = self._env_step(action)
        env_time = self.env.get_env_time()
        # the sub-steps of a step share its first frame
        if result[2] or (self.env.context.is_step_complete and env_time % self.every_k_steps == 0):
            self._take_frame(env_time)
        return result

    @override(Wrapper)
    def reset(self) -> Any:
        observation = self._env_reset()
        # A new one: the frames of the last episode are part of its trajectory.
        self._renderer = RecordedFramesRenderer()
        self._take_frame(self.env.get_env_time())
        return observation

    def get_renderer(self) -> Renderer:
        """Return the renderer that shows the frames of the current episode."""
        return self._renderer

    def _take_frame(self, env_time: int) -> None:
        if not self._can_draw:
            return
        try:
            picture = latest_picture(self._gym_env())
        except gymnasium.error.DependencyNotInstalled as error:
            self._can_draw = False
            print(f"Episodes are recorded without pictures: {error}", flush=True)
            return
        if not isinstance(picture, np.ndarray):
            raise ConfigError(f"FrameRecordingWrapper: expected {self.env!r} to render `rgb_array`, found {picture!r}.")
        self._renderer.add(env_time, picture)

    def _gym_env(self) -> Any:
        return self.env.core_env.env

    def __getstate__(self) -> dict[str, Any]:
        self._release_surfaces()
        return super().__getstate__()

    def _release_surfaces(self) -> None:
        """Drop pygame's surfaces, which cannot be pickled or copied; they are created again for the next frame."""
        env = self._gym_env().unwrapped
        for name, value in vars(env).items():
            if type(value).__module__.partition(".")[0] == "pygame":
                setattr(env, name, None)

    @override(Wrapper)
    def clone_from(self, env: FrameRecordingWrapper, future: Future = "same") -> None:
        env._release_surfaces()
        super().clone_from(env, future)
        self._renderer = RecordedFramesRenderer()
        self._renderer.frames = dict(env._renderer.frames)


class ParquetRecordingWrapper(PassiveWrapper[MazeEnv[Any]]):
    """Write each episode as a table in a Parquet file, `<episode id>.parquet`, with a row for each sub-step.

    :class:`~maze.core.trajectory_recording.writers.trajectory_writer_file.ParquetColumns` documents the columns. Key
    performance indicators are among them if a `LogStatsWrapper` is inside of this one. An episode is written when it
    ends, and at a reset or when the environment is closed before its end; not if it was cloned from another
    environment. If the disk is full, one warning is logged and no more tables are written.

    :param env: Environment to record.
    :param output_dir: Directory of the files.
    :raises ConfigImportError: pyarrow is missing.
    """

    CLONED = ("_rows", "_observation")  # observations are replaced, never written to

    propensities: Callable[[Sequence[SpacesRecord]], np.ndarray | None] | None = None
    """Returns the probabilities (densities) of the actions of an episode; `None`: they are unknown."""

    def __init__(self, env: MazeEnv[Any], output_dir: str | Path = "trajectory_parquet") -> None:
        super().__init__(env)
        self._directory: Path | None = Path(output_dir).absolute()
        self._interfaces: tuple[type[Any], ...] = ()
        self._columns = self._described_columns()
        self._rows: list[SubstepRow] = []
        self._observation: Any = None

    @override(Wrapper)
    def step(self, action: Any) -> tuple[Any, Any, bool, dict[Any, Any]]:
        env = self.env
        env.context.pre_step()  # a wrapper may answer a sub-step without stepping the environment
        events = env.context.event_service.records
        n_earlier, time = len(events), env.get_env_time()
        record = SpacesRecord(env.actor_id(), self._observation, copy.deepcopy(action))
        observation, reward, done, info = self._env_step(action)
        record.reward, record.done, record.info = reward, done, copy.deepcopy(info) or {}
        self._observation = copy.deepcopy(observation)
        substep = self._rows[-1].substep + 1 if self._rows and self._rows[-1].step == time else 0
        self._rows.append(SubstepRow(time, substep, record, events[n_earlier:]))
        if done:
            self.publish_trajectory()
        return observation, reward, done, info

    @override(Wrapper)
    def reset(self) -> Any:
        self.publish_trajectory()
        observation = self._env_reset()
        self._observation = copy.deepcopy(observation)
        if self._interfaces != tuple(self.env.context.event_service.topics):  # some are created by the first reset
            self._columns = self._described_columns()
        return observation

    def publish_trajectory(self) -> None:
        """Write the current episode, once, if it has any steps and was not cloned from another environment."""
        rows, self._rows = self._rows, []
        if not rows or self._directory is None or self.env.context.is_copied:
            return
        episode_id = str(self.env.get_episode_id())
        known = None if self.propensities is None else self.propensities([row.record for row in rows])
        for row, propensity in zip(rows, [] if known is None else known.tolist(), strict=False):
            row.record.info[PROPENSITY] = propensity
        log = getattr(self.env, "get_episode_event_log", None) if rows[-1].record.done else None
        kpis = {} if log is None else {event.name: event.value for event in log().query_events(BaseEnvEvents.kpi)}
        try:
            self._columns.write(self._directory / f"{file_stem(episode_id)}.parquet", episode_id, rows, kpis)
        except OSError as error:
            _LOGGER.warning("Episode %s cannot be written (%s); no more tables are written.", episode_id, error)
            self._directory = None

    def close(self) -> None:
        """Write an unfinished episode, and close the environment."""
        self.publish_trajectory()
        self.env.close()

    def _described_columns(self) -> ParquetColumns:
        env = self.env
        self._interfaces = tuple(env.context.event_service.topics)
        return ParquetColumns(env.observation_spaces_dict, env.action_spaces_dict, self._interfaces)
