"""The second thread of a deployment, and the way to and from it."""

from __future__ import annotations

import contextvars
import os
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from maze.core.agent.policy import Policy
from maze.core.agent_deployment.external_core_env import DeploymentError, ExternalCoreEnv, Signal, StateUpdate
from maze.core.agent_deployment.policy_executor import PolicyExecutor
from maze.core.agent_deployment.served_env import ServedEnv, Watch
from maze.core.env.core_env import CoreEnv
from maze.core.env.structured_env import ActorID
from maze.core.rendering.renderer import Renderer

END_TIMEOUT = 5.0
"""Seconds the second thread gets to leave."""


class Session:
    """Runs policy and environment in a thread, which only ever runs while this one waits for it.

    Wrappers call the `step` of what they wrap and want its result, but the result is only known after the action went
    out to the real system. So the wrappers wait, in the middle of their `step`, in a thread of their own.

    The thread holds no reference to the deployment, and the process does not wait for it.

    :param env: Environment with all its wrappers.
    :param policy: The policy.
    :param num_candidates: Number of actions to ask the policy for.
    :param deterministic: Take the most probable action instead of sampling one.
    :param watch: Is told of each observation, with its sub-step.
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
        """Starts the thread, and returns when it waits for the first state."""
        self._thread.start()
        self._reply()

    def exchange(self, update: StateUpdate | None, actor_id: ActorID | None = None) -> Any:
        """Reports a state and waits for what comes of it.

        :param update: The state; None aborts the episode.
        :param actor_id: Who acts next.
        :return: An action of the simulation, or `Signal.EPISODE_AWAITED`.
        :raises DeploymentError: The deployment was begun in another process.
        """
        if os.getpid() != self._pid:
            raise DeploymentError(
                f"This deployment was begun in the process {self._pid} and cannot be used in a fork of it "
                f"({os.getpid()}). Make deployments in the process that uses them."
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
        """Ends the thread and puts the environment back as it was. Calling it again does nothing.

        :param update: The last state of the running episode; None aborts it where it is.
        :raises DeploymentError: The thread did not leave in time.
        """
        self._is_last_episode.set()
        if os.getpid() == self._pid and self._thread.is_alive():
            self._states.put(update)
            if threading.current_thread() is not self._thread:
                self._thread.join(END_TIMEOUT)
                if self._thread.is_alive():
                    raise DeploymentError(
                        f"The policy or a wrapper is still busy after {END_TIMEOUT:g} s. Its thread leaves when it is "
                        f"done, at the latest with this process; do not use the environment before."
                    )
        self._served.restore()
        try:
            error = self._exceptions.get_nowait()
        except Empty:
            return
        raise error

    def end_quietly(self) -> None:
        """Ends the thread on behalf of a deployment that nobody holds on to any more."""
        with suppress(Exception):  # nobody is left who could be told
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
