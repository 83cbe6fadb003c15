"""The rollout loop of a deployment."""

from __future__ import annotations

from contextlib import suppress
from threading import Event
from typing import Any

from maze.core.agent.policy import Policy
from maze.core.agent_deployment.external_core_env import AnyQueue, EpisodeAborted
from maze.core.agent_deployment.maze_action_candidates import ActionCandidates


class PolicyExecutor:
    """Run the loop of a rollout, episode after episode.

    :param env: Environment with an :class:`~maze.core.agent_deployment.external_core_env.ExternalCoreEnv` below.
    :param policy: The policy.
    :param rollout_done_event: Set when the running episode is the last one.
    :param exception_queue: Receives the exception that ends the loop.
    :param num_candidates: Number of actions that the policy returns.
    :param deterministic: Choose the greedy action instead of a sampled one.
    """

    def __init__(
        self,
        env: Any,
        policy: Policy,
        rollout_done_event: Event,
        exception_queue: AnyQueue,
        num_candidates: int,
        deterministic: bool = False,
    ) -> None:
        self.env = env
        self.policy = policy
        self.rollout_done_event = rollout_done_event
        self.exception_queue = exception_queue
        self.num_candidates = num_candidates
        self.deterministic = deterministic
        self._needs_state = policy.needs_state()
        self._needs_env = policy.needs_env()

    def run_rollout_loop(self) -> None:
        """Run episodes; reset the environment after the last one, which completes statistics and records."""
        try:
            while not self.rollout_done_event.is_set():
                with suppress(EpisodeAborted):
                    self._run_episode()
            with suppress(EpisodeAborted):
                self.env.reset()
        except BaseException as error:
            self.exception_queue.put(error)

    def _run_episode(self) -> None:
        env = self.env
        observation = env.reset()
        done = False
        while not done:
            observation, _, done, _ = env.step(self._choose(observation))

    def _choose(self, observation: Any) -> Any:
        env = self.env
        maze_state = env.get_maze_state() if self._needs_state else None
        env_for_policy = env if self._needs_env else None
        if self.num_candidates == 1:
            return self.policy.compute_action(
                observation,
                maze_state=maze_state,
                env=env_for_policy,
                actor_id=env.actor_id(),
                deterministic=self.deterministic,
            )
        return ActionCandidates(
            self.policy.compute_top_action_candidates(
                observation,
                num_candidates=self.num_candidates,
                maze_state=maze_state,
                env=env_for_policy,
                actor_id=env.actor_id(),
            )
        )
