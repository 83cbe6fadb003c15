"""Session of a deployment: the thread of policy and wrappers, and the replaced simulation under them."""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.agent.policy import Policy
from maze.core.agent_deployment.external_core_env import DeploymentError, ExternalCoreEnv, Signal, StateUpdate
from maze.core.agent_deployment.maze_action_candidates import (
    ActionCandidates,
    ActionConversionCandidatesInterface,
)
from maze.core.agent_deployment.policy_executor import PolicyExecutor
from maze.core.annotations import override
from maze.core.env.core_env import CoreEnv
from maze.core.env.maze_state import MazeStateType
from maze.core.env.observation_conversion import ObservationConversionInterface
from maze.core.env.structured_env import ActorID
from maze.core.errors import EnvironmentContractError, MazeError, NonFiniteError
from maze.core.rendering.renderer import Renderer
from maze.core.wrappers.monitoring_wrapper import base_maze_env
from maze.core.wrappers.wrapper import ActionWrapper

END_TIMEOUT = 5.0
"""Seconds that the thread has to end."""
Watch = Callable[[Any, Mapping[str, Any]], None]
"""Called with the key and the observation of a sub-step."""


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
    """

    def __init__(
        self, env: Any, policy: Policy, num_candidates: int, deterministic: bool, watch: Watch | None = None
    ) -> None:
        self._pid = os.getpid()
        self._states: SimpleQueue[StateUpdate | None] = SimpleQueue()
        self._actions: SimpleQueue[Any] = SimpleQueue()
        self._exceptions: SimpleQueue[BaseException] = SimpleQueue()
        self._is_last_episode = threading.Event()
        self._served = ServedEnv(env)
        simulation = self._served.simulation
        self._core_env = ExternalCoreEnv(
            simulation.context,
            self._states,
            self._actions,
            self._is_last_episode,
            _renderer_of(simulation),
            simulation.get_kpi_calculator(),
            self._served.maze_env.agent_counts_dict,
        )
        executor = PolicyExecutor(
            env, policy, self._is_last_episode, self._exceptions, num_candidates, deterministic=deterministic
        )
        # Statistics go to the writers of the thread that began the session.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(_run, executor, self._actions), name="maze-agent-deployment", daemon=True
        )
        self._served.replace_simulation(self._core_env, num_candidates, watch)

    def begin(self) -> None:
        """Start the thread, and return when it waits for the first state."""
        self._thread.start()
        self._reply()

    def exchange(self, update: StateUpdate | None, actor_id: ActorID | None = None) -> Any:
        """Report a state and wait for the reply.

        :param update: The state; None aborts the episode.
        :param actor_id: The actor that acts next.
        :return: An action of the simulation, or `Signal.EPISODE_AWAITED`.
        :raises DeploymentError: The deployment has started in another process.
        """
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
        self._served.restore()
        try:
            error = self._exceptions.get_nowait()
        except Empty:
            return
        raise error

    def end_quietly(self) -> None:
        """End the thread of a deployment that is no longer referenced."""
        with suppress(Exception):  # there is no caller to report to
            self.end()


def _renderer_of(simulation: CoreEnv) -> Renderer | None:
    try:
        return simulation.get_renderer()
    except NotImplementedError:
        return None


def _run(executor: PolicyExecutor, actions: SimpleQueue[Any]) -> None:
    try:
        executor.run_rollout_loop()
    finally:
        actions.put(Signal.EXECUTOR_ENDED)


# -- replacement of the simulation -------------------------------------------------------------------------------------


class ServedEnv:
    """An environment whose simulation is replaced until :meth:`restore` is called.

    :param env: The environment with all its wrappers.
    :raises DeploymentError: Another deployment uses the environment.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.maze_env = base_maze_env(env)
        self.simulation: CoreEnv = self.maze_env.core_env
        self._undo: list[Callable[[], None]] = []
        if isinstance(self.simulation, ExternalCoreEnv):
            raise DeploymentError(
                f"{self.maze_env!r} is in use by another deployment. Close that one first, or create an environment "
                f"for each deployment."
            )

    def replace_simulation(self, core_env: ExternalCoreEnv, num_candidates: int, watch: Watch | None = None) -> None:
        """Replace the core environment below the wrappers; convert candidates if there are several."""
        maze_env = self.maze_env
        actions, observations = maze_env.action_conversion_dict, maze_env.observation_conversion_dict

        def put_back() -> None:
            maze_env.action_conversion_dict, maze_env.observation_conversion_dict = actions, observations
            self._set_core_env(self.simulation)

        self._undo.append(put_back)
        maze_env.observation_conversion_dict = {
            key: _StateConversion(conversion, type(maze_env).__name__, key, watch)
            for key, conversion in observations.items()
        }
        if num_candidates > 1:
            maze_env.action_conversion_dict = {
                key: ActionConversionCandidatesInterface(conversion) for key, conversion in actions.items()
            }
            for layer in self._layers():
                if issubclass(type(layer), ActionWrapper):
                    self._apply_to_each_candidate(layer)
        self._set_core_env(core_env)

    def restore(self) -> None:
        """Restore the environment."""
        while self._undo:
            self._undo.pop()()

    def _layers(self) -> list[Any]:
        """The wrappers around the Maze environment, innermost first."""
        layers: list[Any] = []
        env = self.env
        while env is not self.maze_env:
            layers.insert(0, env)
            env = env.env
        return layers

    def _set_core_env(self, core_env: CoreEnv) -> None:
        self.maze_env.core_env = core_env
        for layer in self._layers():
            layer.env = layer.env  # rebinds the methods that wrappers hold

    def _apply_to_each_candidate(self, wrapper: Any) -> None:
        convert = wrapper.action

        def convert_each(action: Any) -> Any:
            if not isinstance(action, ActionCandidates):
                return convert(action)
            return ActionCandidates(([convert(one) for one in action.candidates], action.probabilities))

        wrapper.__dict__["action"] = convert_each
        self._undo.append(lambda: wrapper.__dict__.pop("action", None))


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
                f"{type(maze_state).__name__} ({type(error).__name__}: {error}). {_hint(maze_state)}"
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


def _hint(maze_state: MazeStateType) -> str:
    if isinstance(maze_state, tuple) and len(maze_state) == 2 and isinstance(maze_state[1], dict):
        return "This is probably (observation, info) of gymnasium's reset(); pass the observation."
    return "Expected a state as the simulation of the environment returns it."
