"""Environments in another process than the learner's, with a copy of its policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from maze.core.wrappers.return_normalization_reward_wrapper import statistics_states
from maze.train.parallelization.distributed_actors.env_groups import EnvGroup, EpisodeRelay, RolloutPlan
from maze.train.parallelization.distributed_actors.rollout_packet import ActorSpaces, RolloutPacket
from maze.train.parallelization.vector_env.stats_codec import EncodedStats, StatsEncoder

if TYPE_CHECKING:
    from maze.core.agent.policy import Policy
    from maze.core.log_stats.log_stats import LogStats
    from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv


class Fragment(NamedTuple):
    """What the learner is told."""

    packet: RolloutPacket | None
    """`None`: episodes were played, and nothing was collected."""
    episodes: list[EncodedStats]
    wrappers: list[Any]
    """What the wrappers of each environment have learned; empty: nothing learns."""
    generators: Any = None
    """State of the policy's generators afterwards, if it is of interest."""


class ActingGroup:
    """Environments that are stepped by a copy of the learner's policy, and what there is to tell of them.

    :param env: The environments.
    :param name: What messages call them.
    :param seeds: A seed for each of them; empty: they are told later.
    :param wrappers: What the wrappers of each have learned before; empty: nothing.
    :param encoder: Encodes statistics for one who is told everything; `None`: each fragment can be decoded by itself.
    """

    def __init__(
        self,
        env: StructuredVectorEnv,
        name: str,
        seeds: Sequence[Any] = (),
        wrappers: Sequence[Any] = (),
        encoder: StatsEncoder | None = None,
    ) -> None:
        self.env = env
        self._group = EnvGroup(env, name)
        self._encoder = encoder
        self._episodes: list[LogStats] = []
        env.epoch_stats = EpisodeRelay(self._episodes.append)
        if seeds:
            env.seed(seeds)
        if any(wrappers):
            env.load_state_dict({"environments": [{"wrappers": learned, "problem": ""} for learned in wrappers]})

    def spaces(self) -> ActorSpaces:
        """The spaces of the environments."""
        return ActorSpaces.of(self.env)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the vector environment."""
        return getattr(self.env, method)(*arguments)

    def close(self) -> None:
        """Closes the environments."""
        self.env.close()

    def collect(self, policy: Policy, plan: RolloutPlan) -> Fragment:
        """Collects a rollout; see :meth:`EnvGroup.collect`."""
        return self._told(self._group.collect(policy, plan))

    def play(self, policy: Policy, quota: np.ndarray, deterministic: bool) -> Fragment:
        """Plays episodes; see :meth:`EnvGroup.play`."""
        self._episodes.clear()
        self._group.play(policy, quota, deterministic)
        return self._told(None)

    def _told(self, packet: RolloutPacket | None) -> Fragment:
        encoder = self._encoder or StatsEncoder()
        episodes = [encoder.encode(stats) for stats in self._episodes]
        self._episodes.clear()
        learned = [statistics_states(env) for env in getattr(self.env, "envs", ())]
        return Fragment(packet, episodes, learned if any(learned) else [])
