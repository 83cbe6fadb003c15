"""Environments whose steps consist of sub-steps taken by different actors."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple, Union

import numpy as np

from maze.core.env.base_env import BaseEnv

StepKeyType = Union[str, int]
"""Names a sub-step, and with it the policy that acts in it."""


ACTORS_DONE_KEY = "actors_done"
"""Key of `info` for actors that are done, where it need not be the one that has just acted: how many sub-steps ago each
of them acted last, 0 for the one just taken. For them it says what `is_actor_done` says of the last one."""


class ActorID(NamedTuple):
    """Who acts: a policy, named by the sub-step it belongs to, on behalf of an agent.

    :param step_key: Sub-step; all agents with the same key share a policy.
    :param agent_id: Counts the agents of the sub-step from zero.
    """

    step_key: StepKeyType
    agent_id: int


class StructuredEnv(BaseEnv):
    """Environment that says before each `step` which actor it wants an action from.

    Covers flat environments (always the same actor), multi-step, multi-agent and hierarchical ones.
    """

    @abstractmethod
    def actor_id(self) -> ActorID:
        """The actor that acts next. Identities of actors that are done are not used again in the same episode."""

    @abstractmethod
    def is_actor_done(self) -> bool:
        """Whether the actor that has just acted is done; different from the episode being over."""

    @property
    @abstractmethod
    def agent_counts_dict(self) -> dict[StepKeyType, int]:
        """Number of agents per sub-step; -1 where it varies."""

    def get_actor_rewards(self) -> np.ndarray | None:
        """Rewards of the environment step just completed, one per actor in the order in which they acted.

        The array has the shape `[n_actors]`. Where sub-steps of earlier steps of the episode have earned something in
        this one, as the last move of who loses a game, it is longer: entries for these come before, in the same order,
        down to the latest, and add to what they had.

        :return: None where rewards cannot be attributed to actors; all sub-steps then share the step's reward.
        """
        return None
