"""A small cutting environment with events and KPIs, flat or with two sub-steps, whose numbers are easy to work out."""

# Event interfaces have no abstract methods: topics implement all of them.

from __future__ import annotations

from abc import ABC

import numpy as np
from gymnasium import spaces

from maze.core.env.action_conversion import ActionConversionInterface
from maze.core.env.core_env import CoreEnv
from maze.core.env.maze_env import MazeEnv
from maze.core.env.observation_conversion import ObservationConversionInterface
from maze.core.env.structured_env import ActorID
from maze.core.events.pubsub import Pubsub
from maze.core.log_events.kpi_calculator import KpiCalculator
from maze.core.log_stats.event_decorators import define_episode_stats, define_epoch_stats, define_step_stats


class CuttingEvents(ABC):
    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def valid_cut(self, piece, area):
        pass

    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def invalid_cut(self, piece, area):
        pass


class InventoryEvents(ABC):
    @define_epoch_stats(np.mean, input_name="step_mean", output_name="step_mean")
    @define_epoch_stats(max, input_name="step_max", output_name="step_max")
    @define_episode_stats(np.mean, output_name="step_mean")
    @define_episode_stats(max, output_name="step_max")
    @define_step_stats(None)
    def pieces_in_inventory(self, value):
        pass

    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def piece_replenished(self):
        pass


class RawPieceUsage(KpiCalculator):
    def calculate_kpis(self, episode_event_log, last_maze_state):
        n_replenished = len(episode_event_log.query_events(InventoryEvents.piece_replenished))
        return {"raw_piece_usage_per_step": n_replenished / len(episode_event_log.step_event_logs)}


class CuttingCoreEnv(CoreEnv):
    """Cut order 1 is a valid cut: reward -1, two pieces more, one of them a new raw piece. Cut order 0: reward -2.

    With two sub-steps the piece is chosen first (reward 0.5) and the order afterwards.
    """

    def __init__(self, is_flat=True, has_kpis=True, episode_length=4):
        super().__init__()
        self.is_flat = is_flat
        self.kpi_calculator = RawPieceUsage() if has_kpis else None
        self.episode_length = episode_length
        self.pubsub = Pubsub(self.context.event_service)
        self.stage = 0
        self.n_pieces = 0
        self.time = 0

    def reset(self):
        self.inventory_events = self.pubsub.create_event_topic(InventoryEvents)
        self.cutting_events = self.pubsub.create_event_topic(CuttingEvents)
        self.stage = self.n_pieces = self.time = 0
        self.replenish()
        return self.get_maze_state()

    def replenish(self):
        self.n_pieces += 1
        self.inventory_events.piece_replenished()

    def step(self, maze_action):
        if not self.is_flat and self.stage == 0:
            self.stage = 1
            return self.get_maze_state(), 0.5, False, {}
        self.stage = 0
        self.time += 1
        is_valid = maze_action["cut_order"] == 1
        if is_valid:
            self.cutting_events.valid_cut(piece=(1, 2), area=2.0)
            self.n_pieces += 1
            self.replenish()
        else:
            self.cutting_events.invalid_cut(piece=(1, 2), area=2.0)
        self.inventory_events.pieces_in_inventory(self.n_pieces)
        return self.get_maze_state(), -1 if is_valid else -2, self.time == self.episode_length, {}

    def get_kpi_calculator(self):
        return self.kpi_calculator

    def get_maze_state(self):
        return self.n_pieces

    def actor_id(self):
        return ActorID(self.stage, 0)

    def is_actor_done(self):
        return False

    @property
    def agent_counts_dict(self):
        return {0: 1} if self.is_flat else {0: 1, 1: 1}

    def seed(self, seed):
        pass

    def close(self):
        pass

    def get_serializable_components(self):
        return {}

    def get_renderer(self):
        raise NotImplementedError

    def clone_from(self, env):
        self.stage, self.n_pieces, self.time = env.stage, env.n_pieces, env.time


class Actions(ActionConversionInterface):
    def __init__(self, **sizes):
        self.sizes = sizes

    def space_to_maze(self, action, maze_state):
        return action

    def maze_to_space(self, maze_action):
        return maze_action

    def space(self):
        return spaces.Dict({name: spaces.Discrete(size) for name, size in self.sizes.items()})


class Observations(ObservationConversionInterface):
    def maze_to_space(self, maze_state):
        return {"inventory": np.asarray([maze_state], dtype=np.float32)}

    def space(self):
        return spaces.Dict({"inventory": spaces.Box(0, 100, (1,), np.float32)})


def cutting_env(is_flat=True, **kwargs):
    if is_flat:
        conversions = {0: Actions(piece_idx=5, cut_order=2)}
    else:
        conversions = {0: Actions(piece_idx=5), 1: Actions(cut_order=2, cut_rotation=2)}
    return MazeEnv(CuttingCoreEnv(is_flat, **kwargs), conversions, dict.fromkeys(conversions, Observations()))


def act(piece_idx, cut_order):
    return {"piece_idx": np.int64(piece_idx), "cut_order": np.int64(cut_order)}


FOUR_STEPS = [act(3, 1), act(0, 0), act(4, 1), act(1, 0)]
"""Rewards -1, -2, -1, -2; pieces in the inventory 3, 3, 5, 5; three raw pieces with that of the reset."""

FOUR_STRUCTURED_STEPS = [
    action
    for step in FOUR_STEPS
    for action in ({"piece_idx": step["piece_idx"]}, {"cut_order": step["cut_order"], "cut_rotation": np.int64(1)})
]
