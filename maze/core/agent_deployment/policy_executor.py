"""The thread of a deployment: the rollout loop of policy and wrappers, above a replaced simulation."""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.agent.policy import Policy, acting_in
from maze.core.agent_deployment.external_core_env import (
    AnyQueue,
    DeploymentError,
    EpisodeAborted,
    ExternalCoreEnv,
    Signal,
    StateUpdate,
)
from maze.core.agent_deployment.maze_action_candidates import ActionCandidates, ActionConversionCandidatesInterface
from maze.core.annotations import override
from maze.core.env.core_env import CoreEnv
from maze.core.env.maze_state import MazeStateType
from maze.core.env.observation_conversion import ObservationConversionInterface
from maze.core.env.structured_env import ActorID
from maze.core.errors import EnvironmentContractError, MazeError, NonFiniteError
from maze.core.wrappers.monitoring_wrapper import base_maze_env
from maze.core.wrappers.wrapper import ActionWrapper

END_TIMEOUT = 5.0
"""Seconds that the thread has to end."""
Watch = Callable[[Any, Mapping[str, Any]], None]
"""Called with the key and the observation of a sub-step."""


@dataclass(eq=False)
class PolicyExecutor:
    """Run the loop of a rollout, episode after episode.

    :param env: Environment with an :class:`~maze.core.agent_deployment.external_core_env.ExternalCoreEnv` below.
    :param policy: The policy.
    :param rollout_done_event: Set when the running episode is the last one.
    :param exception_queue: Receives the exception that ends the loop.
    :param num_candidates: Number of actions that the policy returns.
    :param deterministic: Choose the greedy action instead of a sampled one.
    """

    env: Any
    policy: Policy
    rollout_done_event: threading.Event
    exception_queue: AnyQueue
    num_candidates: int
    deterministic: bool = False

    def __post_init__(self) -> None:
        self._act = acting_in(self.env, self.policy, self.deterministic)

    def run_rollout_loop(self) -> None:
        """Run episodes; reset the environment after the last one, which completes statistics and records."""
        try:
            while not self.rollout_done_event.is_set():
                with suppress(EpisodeAborted):
                    observation, done = self.env.reset(), False
                    while not done:
                        observation, _, done, _ = self.env.step(self._choose(observation))
            with suppress(EpisodeAborted):
                self.env.reset()
        except BaseException as error:
            self.exception_queue.put(error)

    def _choose(self, observation: Any) -> Any:
        env, policy = self.env, self.policy
        if self.num_candidates == 1:
            return self._act(observation, env.actor_id())
        maze_state = env.get_maze_state() if policy.needs_state() else None
        return ActionCandidates(
            policy.compute_top_action_candidates(
                observation, self.num_candidates, maze_state, env if policy.needs_env() else None, env.actor_id()
            )
        )


class Session:
    """Run policy and environment in a thread, while the calling thread waits.

    Wrappers call the `step` of the wrapped environment and need its result, which is known only after the action has
    been returned to the real system. The wrappers wait for it in their `step`, in a separate thread.

    The thread holds no reference to the deployment, and does not keep the process alive.

    :param env: Environment with all its wrappers.
    :param policy: The policy.
    :param num_candidates: Number of actions that the policy returns.
    :param deterministic: Choose the greedy action instead of a sampled one.
    :param watch: Called with each observation.
    :raises DeploymentError: Another deployment uses the environment.
    """

    def __init__(self, env: Any, policy: Policy, num_candidates: int, deterministic: bool, watch: Watch | None) -> None:
        maze_env = base_maze_env(env)
        simulation: CoreEnv = maze_env.core_env
        if isinstance(simulation, ExternalCoreEnv):
            raise DeploymentError(
                f"{maze_env!r} is in use by another deployment. Close that one first, or create an environment for "
                f"each deployment."
            )
        self._pid = os.getpid()
        self._states: SimpleQueue[StateUpdate | None] = SimpleQueue()
        self._actions: SimpleQueue[Any] = SimpleQueue()
        self._exceptions: SimpleQueue[BaseException] = SimpleQueue()
        self._is_last_episode = threading.Event()
        renderer = None
        with suppress(NotImplementedError):
            renderer = simulation.get_renderer()
        self._core_env = ExternalCoreEnv(
            simulation.context,
            self._states,
            self._actions,
            self._is_last_episode,
            renderer,
            simulation.get_kpi_calculator(),
            maze_env.agent_counts_dict,
        )
        executor = PolicyExecutor(env, policy, self._is_last_episode, self._exceptions, num_candidates, deterministic)
        # Statistics go to the writers of the thread that began the session.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(_run, executor, self._actions), name="maze-agent-deployment", daemon=True
        )
        # Restores the environment.
        self._replaced = ExitStack()
        _replace_simulation(env, maze_env, self._core_env, num_candidates, watch, self._replaced)

    def exchange(self, update: StateUpdate | None, actor_id: ActorID | None = None) -> Any:
        """Report a state and wait for the reply.

        :param update: The state; None aborts the episode.
        :param actor_id: The actor that acts next.
        :return: An action of the simulation, or `Signal.EPISODE_AWAITED`.
        :raises DeploymentError: The deployment has started in another process.
        """
        if not self._thread.ident:  # start, and wait until it waits for the first state
            self._thread.start()
            self._reply()
        if os.getpid() != self._pid:
            raise DeploymentError(
                f"This deployment has started in process {self._pid} and cannot be used in its fork {os.getpid()}. "
                f"Create deployments in the process that uses them."
            )
        if actor_id is not None:
            self._core_env.set_actor_id(actor_id)
        self._states.put(update)
        return self._reply()

    def _reply(self) -> Any:
        reply = self._actions.get()
        if reply is Signal.EXECUTOR_ENDED:
            self._actions.put(reply)
            self.end()
            raise DeploymentError("The deployment's thread ended.")  # pragma: no cover - `end` raises what ended it
        return reply

    def end(self, update: StateUpdate | None = None) -> None:
        """End the thread and restore the environment. Repeated calls have no effect.

        :param update: The last state of the running episode; None aborts it.
        :raises DeploymentError: The thread did not end in time.
        """
        self._is_last_episode.set()
        if os.getpid() == self._pid and self._thread.is_alive():
            self._states.put(update)
            if threading.current_thread() is not self._thread:
                self._thread.join(END_TIMEOUT)
                if self._thread.is_alive():
                    raise DeploymentError(
                        f"The policy or a wrapper is still busy after {END_TIMEOUT:g} s. Its thread ends when it has "
                        f"finished, or with this process; do not use the environment before."
                    )
        self._replaced.close()
        try:
            error = self._exceptions.get_nowait()
        except Empty:
            return
        raise error


def _run(executor: PolicyExecutor, actions: SimpleQueue[Any]) -> None:
    try:
        executor.run_rollout_loop()
    finally:
        actions.put(Signal.EXECUTOR_ENDED)


# -- replacement of the simulation -------------------------------------------------------------------------------------


def _replace_simulation(
    env: Any, maze_env: Any, core_env: ExternalCoreEnv, num_candidates: int, watch: Watch | None, undo: ExitStack
) -> None:
    """Replace the core environment below the wrappers; convert candidates if there are several.

    :param env: The environment with all its wrappers.
    :param maze_env: The environment without them.
    :param core_env: The replacement.
    :param undo: Restores the environment.
    """
    layers = []  # outermost first
    while env is not maze_env:
        layers.append(env)
        env = env.env

    def replace(core: CoreEnv, observations: Any, actions: Any) -> None:
        maze_env.observation_conversion_dict, maze_env.action_conversion_dict = observations, actions
        maze_env.core_env = core  # which reads the conversions
        for layer in reversed(layers):
            layer.env = layer.env  # rebinds the methods that wrappers hold

    observations, actions = maze_env.observation_conversion_dict, maze_env.action_conversion_dict
    undo.callback(replace, maze_env.core_env, observations, actions)
    checked = {key: _StateConversion(each, type(maze_env).__name__, key, watch) for key, each in observations.items()}
    if num_candidates > 1:
        actions = {key: ActionConversionCandidatesInterface(conversion) for key, conversion in actions.items()}
        for layer in layers:
            if issubclass(type(layer), ActionWrapper):
                vars(layer)["action"] = partial(_convert_each, layer.action)
                undo.callback(vars(layer).pop, "action", None)
    replace(core_env, checked, actions)


def _convert_each(convert: Callable[[Any], Any], action: Any) -> Any:
    if not isinstance(action, ActionCandidates):
        return convert(action)
    return ActionCandidates(([convert(one) for one in action.candidates], action.probabilities))


class _StateConversion(ObservationConversionInterface):
    """Convert and check states of the real system.

    :param conversion: The conversion of the environment.
    :param environment: Name of the environment.
    :param step_key: The sub-step.
    :param watch: Called with each observation.
    """

    def __init__(
        self, conversion: ObservationConversionInterface, environment: str, step_key: Any, watch: Watch | None
    ) -> None:
        self.conversion = conversion
        self.place = f"{environment}, sub-step {step_key!r}"
        self._step_key, self._watch = step_key, watch
        self._convert = conversion.maze_to_space
        space: Any = conversion.space()
        entries = space.spaces if isinstance(space, spaces.Dict) else {}
        self._shapes = [(key, entry.shape) for key, entry in entries.items() if entry.shape is not None]

    @override(ObservationConversionInterface)
    def maze_to_space(self, maze_state: MazeStateType) -> Any:
        try:
            observation = self._convert(maze_state)
            for key, shape in self._shapes:
                array = np.asarray(observation[key])
                if array.shape != shape:
                    raise ValueError(f"observation `{key}` has the shape {array.shape}, expected {shape}")
                if array.dtype.kind == "f" and not np.isfinite(array).all():
                    raise NonFiniteError(f"{self.place}: observation `{key}` is not finite: {array}.")
        except MazeError:
            raise
        except Exception as error:
            raise EnvironmentContractError(
                f"{self.place}: {type(self.conversion).__name__} cannot convert a state of type "
                f"{type(maze_state).__name__} ({type(error).__name__}: {error}). Expected a state as the "
                "simulation of the environment returns it; of gymnasium's reset() the observation without the info."
            ) from error
        if self._watch is not None:
            self._watch(self._step_key, observation)
        return observation

    @override(ObservationConversionInterface)
    def space_to_maze(self, observation: Any) -> MazeStateType:
        return self.conversion.space_to_maze(observation)

    @override(ObservationConversionInterface)
    def space(self) -> spaces.Dict:
        return self.conversion.space()
