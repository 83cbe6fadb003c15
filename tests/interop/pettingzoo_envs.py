"""Small environments of PettingZoo whose numbers can be worked out by hand."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv


class Duel(AECEnv):
    """Two players in turn count up to five by ones and twos; who gets there wins, the other one loses.

    Who would exceed five may not: the mask is in the infos.
    """

    metadata = {"name": "duel_v0", "is_parallelizable": False, "render_modes": ["rgb_array"]}

    def __init__(self, goal: int = 5, max_moves: int = 100, render_mode: str | None = None) -> None:
        super().__init__()
        self.goal, self.max_moves, self.render_mode = goal, max_moves, render_mode
        self.possible_agents = ["player_0", "player_1"]
        self.start = 0

    def observation_space(self, agent):
        return spaces.Box(0, 10, (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def observe(self, agent):
        return np.array([self.count], np.float32)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.start = seed % 2
        self.agents = list(self.possible_agents)
        self.count, self.n_moves = self.start, 0
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.agent_selection = "player_0"
        self._tell_masks()

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        other = self.possible_agents[1 - self.possible_agents.index(agent)]
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        is_invalid = self.count + 1 + int(action) > self.goal
        self.count += 1 + int(action)
        self.n_moves += 1
        if self.count >= self.goal:
            self.rewards = {agent: 1.0, other: -1.0}
            self.terminations = dict.fromkeys(self.agents, True)
        elif self.n_moves == self.max_moves:
            self.truncations = dict.fromkeys(self.agents, True)
        self._accumulate_rewards()
        self.agent_selection = other
        self._tell_masks()
        if is_invalid:
            self.infos[agent]["error"] = "too far"

    def render(self):
        return np.full((4, 4, 3), self.count, np.uint8)

    def _tell_masks(self):
        mask = np.array([1, self.count + 2 <= self.goal], np.int8)
        self.infos = {agent: {"action_mask": mask} for agent in self.agents}


class Survivors(ParallelEnv):
    """Each agent earns its number times the time, and leaves at the time that is given for it.

    :param ends: By agent the time of its last step, and whether it is cut off.
    """

    metadata = {"name": "survivors_v0"}
    render_mode = None

    def __init__(self, ends=((1, False), (3, False), (3, True))) -> None:
        self.ends = ends
        self.possible_agents = [f"agent_{number}" for number in range(len(ends))]

    def observation_space(self, agent):
        return spaces.Box(0, 100, (2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(3, start=1)

    def reset(self, seed=None, options=None):
        self.agents, self.time, self.last = list(self.possible_agents), 0, {}
        return self._seen(), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.time += 1
        self.last = dict(actions)
        acted = self.agents
        number = self.possible_agents.index
        rewards = {agent: float((number(agent) + 1) * self.time) for agent in acted}
        over = {agent: self.time >= self.ends[number(agent)][0] for agent in acted}
        cut_off = {agent: over[agent] and self.ends[number(agent)][1] for agent in acted}
        terminated = {agent: over[agent] and not cut_off[agent] for agent in acted}
        observations = self._seen()
        self.agents = [agent for agent in acted if not over[agent]]
        return observations, rewards, terminated, cut_off, {agent: {} for agent in acted}

    def _seen(self):
        number = self.possible_agents.index
        return {agent: np.array([number(agent), self.time], np.float32) for agent in self.agents}
