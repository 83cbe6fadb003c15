"""The simulation, with an exchangeable reward."""

from __future__ import annotations

from typing import Any

from maze.core.annotations import override
from maze.core.env.core_env import CoreEnv
from maze.core.env.reward import RewardAggregatorInterface
from maze.core.utils.factory import ConfigType, Factory
from tutorial_maze_env.part04_events.env.core_env import Cutting2DCoreEnvironment as Part04CoreEnvironment

from .maze_action import Cutting2DMazeAction
from .maze_state import Cutting2DMazeState


class Cutting2DCoreEnvironment(Part04CoreEnvironment):
    """The simulation of part 04 whose reward is computed from its events.

    :param max_pieces_in_inventory: Capacity of the stock. When it is exceeded the oldest pieces are thrown away.
    :param raw_piece_size: Size of a raw piece.
    :param static_demand: Size of the piece that is ordered in every step.
    :param reward_aggregator: Computes the reward: an object, or its configuration.
    """

    def __init__(
        self,
        max_pieces_in_inventory: int,
        raw_piece_size: tuple[int, int],
        static_demand: tuple[int, int],
        reward_aggregator: RewardAggregatorInterface | ConfigType,
    ) -> None:
        super().__init__(max_pieces_in_inventory, raw_piece_size, static_demand)
        self.reward_aggregator = Factory(RewardAggregatorInterface).instantiate(  # type: ignore[type-abstract]
            reward_aggregator, config_path="reward_aggregator"
        )
        self.pubsub.register_subscriber(self.reward_aggregator)

    @override(Part04CoreEnvironment)
    def step(self, maze_action: Cutting2DMazeAction) -> tuple[Cutting2DMazeState, float, bool, dict[Any, Any]]:
        maze_state, _, done, info = super().step(maze_action)
        return maze_state, float(self.reward_aggregator.summarize_reward(maze_state)), done, info

    @override(CoreEnv)
    def clone_from(self, env: CoreEnv) -> None:
        super().clone_from(env)
        assert isinstance(env, Cutting2DCoreEnvironment)
        self.reward_aggregator.clone_from(env.reward_aggregator)
