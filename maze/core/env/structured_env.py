"""Environments whose steps consist of sub-steps taken by different actors."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple, Union

import numpy as np

from maze.core.env.base_env import BaseEnv

StepKeyType = Union[str, int]
"""Identifies a sub-step, and with it the policy that acts in it."""


ACTORS_DONE_KEY = "actors_done"
"""Key of `info` for actors that are done and may not be the last one: the number of sub-steps since each of them acted,
0 for the last sub-step. Equivalent to `is_actor_done`, which refers to the last actor."""


def has_agent(n_agents: int, agent_id: int) -> bool:
    """Return whether a sub-step has an agent.

    :param n_agents: Number of agents of the sub-step; -1 if it varies.
    :param agent_id: Number of the agent, from zero.
    """
    return agent_id >= 0 and (n_agents < 0 or agent_id < n_agents)


class ActorID(NamedTuple):
    """Actor: a policy, identified by its sub-step, that acts for an agent.

    :param step_key: Sub-step; all agents with the same key share a policy.
    :param agent_id: Number of the agent in the sub-step, from zero.
    """

    step_key: StepKeyType
    agent_id: int


class StructuredEnv(BaseEnv):
    """Environment that names the actor of each `step` in advance.

    Includes flat environments (always the same actor), multi-step, multi-agent and hierarchical ones.
    """

    @abstractmethod
    def actor_id(self) -> ActorID:
        """Return the next actor. Identities of actors that are done are not reused in the same episode."""

    @abstractmethod
    def is_actor_done(self) -> bool:
        """Return whether the last actor is done, independent of the end of the episode."""

    @property
    @abstractmethod
    def agent_counts_dict(self) -> dict[StepKeyType, int]:
        """Number of agents per sub-step; -1 if it varies."""

    def get_actor_rewards(self) -> np.ndarray | None:
        """Return the rewards of the last environment step, one per actor in the order in which they acted.

        The array has the shape `[n_actors]`. If this step rewards sub-steps of earlier steps of the episode, such as
        the last move of the loser of a game, the array is longer: the rewards of these sub-steps come first, in the
        same order, and are added to their earlier rewards.

        :return: `None`: rewards cannot be attributed to actors; all sub-steps then share the step's reward.
        """
        return None
