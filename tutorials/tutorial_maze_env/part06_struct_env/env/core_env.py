"""The simulation, with orders that take turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from maze.core.annotations import override
from maze.core.env.core_env import CoreEnv
from maze.core.env.reward import RewardAggregatorInterface
from maze.core.utils.factory import ConfigType
from tutorial_maze_env.part05_reward.env.core_env import Cutting2DCoreEnvironment as Part05CoreEnvironment

from .maze_action import Cutting2DMazeAction
from .maze_state import Cutting2DMazeState

Size = tuple[int, int]


class Cutting2DCoreEnvironment(Part05CoreEnvironment):
    """The simulation of part 05 with several orders that repeat in a fixed sequence.

    :param max_pieces_in_inventory: Capacity of the stock. When it is exceeded the oldest pieces are thrown away.
    :param raw_piece_size: Size of a raw piece.
    :param static_demand: Sizes of the ordered pieces, one per step, over and over.
    :param reward_aggregator: Computes the reward: an object, or its configuration.
    """

    def __init__(
        self,
        max_pieces_in_inventory: int,
        raw_piece_size: Size,
        static_demand: Sequence[Size],
        reward_aggregator: RewardAggregatorInterface | ConfigType,
    ) -> None:
        self.static_demand = [(order[0], order[1]) for order in static_demand]
        self._n_steps = 0
        super().__init__(max_pieces_in_inventory, raw_piece_size, self.static_demand[0], reward_aggregator)

    @override(Part05CoreEnvironment)
    def _setup_env(self) -> None:
        super()._setup_env()
        self._n_steps = 0
        self.current_demand = self.static_demand[0]

    @override(Part05CoreEnvironment)
    def step(self, maze_action: Cutting2DMazeAction) -> tuple[Cutting2DMazeState, float, bool, dict[Any, Any]]:
        _, reward, done, info = super().step(maze_action)
        self._n_steps += 1
        self.current_demand = self.static_demand[self._n_steps % len(self.static_demand)]
        return self.get_maze_state(), reward, done, info

    @override(CoreEnv)
    def clone_from(self, env: CoreEnv) -> None:
        super().clone_from(env)
        assert isinstance(env, Cutting2DCoreEnvironment)
        self._n_steps = env._n_steps
