"""Deployment of an agent in a real system, which requests actions."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from enum import Enum, auto
from pathlib import Path
from typing import Any

import numpy as np

from maze.core.agent.policy import Policy
from maze.core.agent_deployment.external_core_env import DeploymentError, EpisodeOverError, Signal, StateUpdate, checked
from maze.core.agent_deployment.policy_executor import END_TIMEOUT, Session
from maze.core.annotations import override
from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_env import MazeEnv
from maze.core.env.maze_state import MazeStateType
from maze.core.env.structured_env import ActorID
from maze.core.errors import EnvironmentContractError
from maze.core.events.event_record import EventRecord
from maze.core.log_stats.log_stats import LogStats, LogStatsAggregator, LogStatsConsumer, LogStatsLevel
from maze.core.rollout.rollout_runner import RolloutRunner
from maze.core.utils.config_utils import whole_number
from maze.core.utils.factory import CollectionOfConfigType, ConfigType, Factory
from maze.core.utils.import_guard import imports_guarded
from maze.core.utils.stored_config import StoredRun
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.monitoring_wrapper import base_maze_env
from maze.core.wrappers.observation_normalization.observation_normalization_wrapper import (
    ObservationNormalizationWrapper,
)

_ONLY_ACTOR = ActorID(0, 0)


class _Phase(Enum):
    BETWEEN_EPISODES = auto()
    ACTING = auto()
    FAILED = auto()
    CLOSED = auto()


class AgentDeployment(AbstractContextManager["AgentDeployment"]):
    """Combine a policy with its wrappers and conversions, for a system that is not stepped.

    The real system reports each state by :meth:`act` and receives an action, both as in the simulation of the
    environment. Conversions, stacked and normalised observations, skipped steps, events, statistics and KPIs are those
    of a rollout.

    >>> deployment = AgentDeployment(policy, env)  # doctest: +SKIP
    >>> for maze_state in episodes:  # doctest: +SKIP
    ...     reward, done, info = 0, False, {}
    ...     while not done:
    ...         maze_action = deployment.act(maze_state, reward, done, info)
    ...         maze_state, reward, done, info = system.execute(maze_action)
    ...     deployment.finish_episode(maze_state, reward, done, info)
    >>> deployment.close()  # doctest: +SKIP

    An environment that is passed as an object is in use until :meth:`close`, which restores it.

    :param policy: Policy, or configuration of one.
    :param env: Maze environment, with or without wrappers, or configuration of one. It is never stepped.
    :param wrappers: Wrappers to put around it, innermost first.
    :param num_candidates: Above 1, :meth:`act` returns up to that many actions with their probabilities, as
        :class:`~maze.core.agent_deployment.maze_action_candidates.MazeActionCandidates`.
    :param deterministic: Choose the greedy action instead of a sampled one.
    :param input_dir: Directory that file names in the configurations refer to.
    :param stats_window: Number of the latest episodes that :attr:`stats` covers.
    :param watch: Called with sub-step and converted observation.
    """

    def __init__(
        self,
        policy: ConfigType,
        env: ConfigType,
        wrappers: CollectionOfConfigType | None = None,
        num_candidates: int = 1,
        deterministic: bool = False,
        input_dir: str = "",
        stats_window: int = 1000,
        watch: Callable[[Any, Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.num_candidates = whole_number("num_candidates", num_candidates, at_least=1)
        self.deterministic = deterministic
        self._owns_env = not isinstance(env, MazeEnv)
        self._stats = DeploymentStats(whole_number("stats_window", stats_window, at_least=1))
        self._phase = _Phase.BETWEEN_EPISODES
        self._failure = ""
        self._n_steps = 0
        self._watch = watch
        self._session: Session | None = None
        self._session_end: weakref.finalize[..., Any] = weakref.finalize(self, int)  # there is no session to end
        self._lock = threading.Lock()

        self.env: Any
        self.env, self.policy = RolloutRunner.init_env_and_agent(env, wrappers or {}, 0, policy, input_dir)
        if isinstance(self.env, ObservationNormalizationWrapper):
            self.env.get_statistics()  # raises an error early if they are missing
        listeners = self.env.context.event_service.on_clear
        known = list(listeners)
        if not isinstance(self.env, LogStatsWrapper):
            self.env = LogStatsWrapper.wrap(self.env)
            # It would never be emptied.
            self.env.get_stats(LogStatsLevel.EPISODE).remove_consumer(self.env.get_stats(LogStatsLevel.EPOCH))
        episode_stats = self.env.get_stats(LogStatsLevel.EPISODE)
        episode_stats.register_consumer(self._stats)
        added = [listener for listener in listeners if listener not in known]
        self._stop_listening = weakref.finalize(self, _stop_listening, listeners, added, episode_stats, self._stats)
        agent_counts = base_maze_env(self.env).agent_counts_dict
        self._step_keys = list(agent_counts)
        self._only_actor = ActorID(self._step_keys[0], 0) if list(agent_counts.values()) == [1] else _ONLY_ACTOR

    @classmethod
    def from_run(
        cls,
        run_dir: str | Path,
        num_candidates: int = 1,
        deterministic: bool = False,
        device: str = "cpu",
        state_dict_file: str = "state_dict.pt",
        trusted_packages: Sequence[str] = (),
    ) -> AgentDeployment:
        """Deploy a training run: environment, wrappers with their statistics, model, weights.

        :param run_dir: The run's directory.
        :param num_candidates: See the constructor.
        :param deterministic: See the constructor.
        :param device: Device of the networks.
        :param state_dict_file: The weights to load.
        :param trusted_packages: Your packages whose classes and functions the stored configuration may name, in
            addition to the environments, wrappers and networks of Maze and torch.
        """
        with imports_guarded():
            run = StoredRun(run_dir, trusted_packages).deployed(device, state_dict_file)
            return cls(run.policy, run.env, run.wrappers, num_candidates, deterministic, input_dir=str(run_dir))

    @classmethod
    def from_bundle(
        cls,
        bundle: str | Path,
        env: ConfigType,
        wrappers: CollectionOfConfigType | None = None,
        num_candidates: int = 1,
        deterministic: bool = False,
    ) -> AgentDeployment:
        """Deploy a policy bundle in its training environment; needs no torch.

        Drift of the observations is logged as a warning. Without the environment's code, act by
        :meth:`maze.serve.bundle.PolicyBundle.session`.

        :param bundle: The file.
        :param env: See the constructor.
        :param wrappers: Wrappers of the training.
        :param num_candidates: See the constructor.
        :param deterministic: See the constructor.
        """
        factory: Factory[Any] = Factory(Policy)
        policy = factory.instantiate({"_target_": "maze.serve.policy.BundlePolicy", "bundle": str(bundle)})
        return cls(policy, env, wrappers, num_candidates, deterministic, watch=policy.drift_guard.watch)

    # -- acting -------------------------------------------------------------------------------------------------------

    def act(
        self,
        maze_state: MazeStateType,
        reward: float | np.ndarray | Any | None,
        done: bool,
        info: Mapping[Any, Any] | None,
        events: list[EventRecord] | None = None,
        actor_id: ActorID = ActorID(0, 0),  # noqa: B008 - a constant
        is_step_complete: bool | None = None,
    ) -> MazeActionType:
        """Report a state and return the action for it.

        A reward that is an array has the shape `[n_actors]`. Errors of the policy, of wrappers and of conversions are
        raised here and end the episode: the next call is :meth:`finish_episode` or :meth:`close`.

        :param maze_state: The state. States are reported one by one in their order.
        :param reward: Reward of the last action; ignored for the first state of an episode.
        :param done: Whether the episode is over. Report such a state by :meth:`finish_episode` or :meth:`close`.
        :param info: Further information about the last action.
        :param events: Events since the last state, for statistics and KPIs.
        :param actor_id: The acting actor; optional where there is only one.
        :param is_step_complete: Whether the last action completed an environment step. By default it did if the actor
            that began the step acts again; required where actors are chosen freely.
        :return: The action, or candidates.
        :raises EpisodeOverError: A wrapper ended the episode with this state.
        :raises DeploymentError: The deployment is closed, another thread uses it, the episode has failed, or `done`.
        :raises EnvironmentContractError: An argument has a wrong type, or the actor is unknown; the episode continues.
        :raises NonFiniteError: The reward is NaN or infinite; the episode continues.
        """
        with self._in_use("act"):
            if self._phase is _Phase.FAILED:
                raise DeploymentError(
                    f"act: the episode failed before ({self._failure}). Call finish_episode() to abandon it; the next "
                    f"act(...) then expects the first state of another one."
                )
            if done:
                raise DeploymentError(
                    f"act: the episode is over (done={done!r}), there is no action for its last state. Report it by "
                    f"finish_episode(maze_state, reward, done, info), and the first state of the next episode by "
                    f"act(...) with done=False; or close(maze_state, reward, done, info)."
                )
            update = checked("act", self._n_steps, maze_state, reward, False, info, events, is_step_complete)
            actor: Any = self._only_actor if actor_id == _ONLY_ACTOR else actor_id
            if not isinstance(actor, tuple) or len(actor) != 2 or actor[0] not in self._step_keys:
                raise EnvironmentContractError(
                    "act: `actor_id` must be ActorID(step_key, agent_id) with one of the step keys "
                    f"{self._step_keys}, found {actor_id!r}."
                )
            reply = self._exchange(update, ActorID(*actor))
            if reply is Signal.EPISODE_AWAITED:
                n_steps, self._n_steps = self._n_steps, 0
                self._phase = _Phase.BETWEEN_EPISODES
                raise EpisodeOverError(
                    f"act: a wrapper, such as a time limit, ended the episode after {n_steps} actions; it is finished "
                    "and counted. Begin another episode of your system and report its first state by act(...), or "
                    f"deploy the agent without the wrapper. Wrappers: {self.env!r}."
                )
            self._phase = _Phase.ACTING
            self._n_steps += 1
            return reply

    def finish_episode(
        self,
        maze_state: MazeStateType = None,
        reward: float | np.ndarray | Any | None = None,
        done: bool = True,
        info: Mapping[Any, Any] | None = None,
        events: list[EventRecord] | None = None,
    ) -> None:
        """Finish the episode: statistics are completed, wrappers are reset. The next :meth:`act` begins another one.

        A reward that is an array has the shape `[n_actors]`.

        :param maze_state: The last state. Without it, the last action of the episode does not count.
        :param reward: Reward of the last action.
        :param done: Whether the episode is over; otherwise it counts as truncated.
        :param info: Further information about the last action.
        :param events: Events since the last state.
        :raises DeploymentError: The deployment is closed, or another thread uses it.
        """
        with self._in_use("finish_episode"):
            if self._phase is _Phase.ACTING:
                self._exchange(self._last_update("finish_episode", maze_state, reward, done, info, events), None)
            self._phase = _Phase.BETWEEN_EPISODES
            self._n_steps = 0

    def close(
        self,
        maze_state: MazeStateType = None,
        reward: float | np.ndarray | Any | None = None,
        done: bool = False,
        info: Mapping[Any, Any] | None = None,
        events: list[EventRecord] | None = None,
    ) -> None:
        """Finish the running episode, if there is one, and end the thread. Repeated calls have no effect.

        The statistics remain available, in this object and as epoch statistics of its `env`.

        The arguments are those of :meth:`finish_episode`.

        :raises DeploymentError: Another thread is still waiting for an action.
        """
        if not self._lock.acquire(timeout=END_TIMEOUT):
            raise DeploymentError(f"close: another thread is still in act(...) after {END_TIMEOUT:g} s.")
        try:
            if self._phase is _Phase.CLOSED:
                return
            update = None
            if self._phase is _Phase.ACTING:
                update = self._last_update("close", maze_state, reward, done, info, events)
            self._phase = _Phase.CLOSED
            try:
                if self._session is not None:
                    self._session.end(update)
            finally:
                self._session = None
                self._session_end.detach()
                self._stop_listening()
                self.env.get_stats(LogStatsLevel.EPOCH).last_stats = self.stats
                if self._owns_env:
                    self.env.close()
        finally:
            self._lock.release()

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- results ------------------------------------------------------------------------------------------------------

    @property
    def n_episodes(self) -> int:
        """Number of episodes finished so far."""
        return self._stats.n_episodes

    @property
    def stats(self) -> LogStats:
        """Statistics and KPIs over the latest episodes, as of a rollout over them."""
        return self._stats.aggregator(LogStatsLevel.EPOCH).last_stats

    @property
    def last_episode_stats(self) -> LogStats:
        """Statistics and KPIs of the last finished episode; empty before the first one."""
        return self._stats.aggregator(LogStatsLevel.EPISODE).last_stats

    def get_stats_value(
        self, event: Callable[..., Any], level: LogStatsLevel = LogStatsLevel.EPOCH, name: str | None = None
    ) -> Any:
        """Return one statistic.

        :param event: Interface method of the event, such as `BaseEnvEvents.reward`.
        :param level: Of the last episode, or over the latest ones (epoch).
        :param name: Name of the statistic, such as `mean`.
        """
        return self._stats.aggregator(level).last_value(event, name)

    # -- internals ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _in_use(self, method: str) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise DeploymentError(
                f"{method}: another thread is using this deployment, which accepts one state at a time. Use a "
                f"deployment for each system."
            )
        try:
            if self._phase is _Phase.CLOSED:
                raise DeploymentError(f"{method}: this deployment is closed. Create another one.")
            yield
        finally:
            self._lock.release()

    def _last_update(
        self, method: str, maze_state: Any, reward: Any, done: bool, info: Any, events: Any
    ) -> StateUpdate | None:
        if maze_state is None:
            return None
        return checked(method, self._n_steps, maze_state, reward, done, info, events, None, is_last=True)

    def _exchange(self, update: StateUpdate | None, actor: ActorID | None) -> Any:
        session = self._session
        if session is None:
            session = Session(self.env, self.policy, self.num_candidates, self.deterministic, self._watch)
            self._session, self._session_end = session, weakref.finalize(self, _end_quietly, session)
        try:
            return session.exchange(update, actor)
        except BaseException as error:  # any error ends the thread
            self._phase = _Phase.FAILED
            self._failure = f"{type(error).__name__}: {error}"
            self._session_end()
            self._session = None
            raise


def _end_quietly(session: Session) -> None:
    """End the thread of a deployment that is no longer referenced."""
    with suppress(Exception):  # there is no caller to report to
        session.end()


def _stop_listening(listeners: list[Any], added: list[Any], source: LogStatsAggregator, stats: DeploymentStats) -> None:
    """Remove the listeners of a deployment from its environment."""
    for listener in added:
        if listener in listeners:
            listeners.remove(listener)
    source.remove_consumer(stats)


class DeploymentStats(LogStatsConsumer):
    """Keep the statistics of the latest episodes.

    :param window: Number of episodes.
    """

    def __init__(self, window: int) -> None:
        self.n_episodes = 0
        """Number of all episodes."""
        self._episodes: deque[LogStats] = deque(maxlen=window)

    @override(LogStatsConsumer)
    def receive(self, stat: LogStats) -> None:
        self.n_episodes += 1
        self._episodes.append(stat)

    def aggregator(self, level: LogStatsLevel) -> LogStatsAggregator:
        """Return statistics of the last episode, or over the latest ones.

        :param level: Episode or epoch.
        :return: A new aggregator with the statistics as its `last_stats`, empty before the first episode.
        """
        aggregator = LogStatsAggregator(level)
        if level is LogStatsLevel.EPISODE:
            aggregator.last_stats = dict(self._episodes[-1]) if self._episodes else {}
        elif self._episodes:
            for stats in self._episodes:
                aggregator.receive(stats)
            aggregator.reduce()
        return aggregator
