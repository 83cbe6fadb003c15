"""Mechanics of the cutting problem."""

from __future__ import annotations

from typing import Any

from maze.core.annotations import override
from maze.core.env.core_env import CoreEnv
from maze.core.env.environment_context import EnvironmentContext
from maze.core.env.reward import RewardAggregatorInterface
from maze.core.events.pubsub import Pubsub
from maze.core.utils.factory import ConfigType, Factory
from maze_envs.logistics.cutting_2d.demand_generator import DemandGenerator, build_demand_generator
from maze_envs.logistics.cutting_2d.env.events import Cutting2dKpiCalculator, CuttingEvents, InventoryEvents
from maze_envs.logistics.cutting_2d.env.inventory import Inventory
from maze_envs.logistics.cutting_2d.env.maze_action import Cutting2DMazeAction
from maze_envs.logistics.cutting_2d.env.maze_state import Cutting2DMazeState, Size, as_size
from maze_envs.logistics.cutting_2d.env.renderer import Cutting2DRenderer


class Cutting2DCoreEnvironment(CoreEnv):
    """Fulfil one order per step by cutting a piece on stock.

    There is always a raw piece on stock: when it is cut, another one is delivered. What is left of a piece goes back to
    the stock. An attempt that is not possible changes nothing; the order is lost.

    :param max_pieces_in_inventory: Capacity of the stock. When it is exceeded the oldest pieces are thrown away.
    :param raw_piece_size: Size of a raw piece.
    :param demand_generator: Says what is ordered: an object, or its configuration.
    :param reward_aggregator: Computes the reward from events: an object, or its configuration.
    :param context: Context to take part in; a new one by default.
    """

    def __init__(
        self,
        max_pieces_in_inventory: int,
        raw_piece_size: Size,
        demand_generator: DemandGenerator | ConfigType,
        reward_aggregator: RewardAggregatorInterface | ConfigType,
        context: EnvironmentContext | None = None,
    ) -> None:
        super().__init__(context)
        self.raw_piece_size = as_size(raw_piece_size, "core_env.raw_piece_size")
        self.demand_generator = build_demand_generator(demand_generator, self.raw_piece_size)
        self.reward_aggregator = Factory(RewardAggregatorInterface).instantiate(  # type: ignore[type-abstract]  # a subclass
            reward_aggregator, config_path="core_env.reward_aggregator"
        )
        self.kpi_calculator = Cutting2dKpiCalculator()
        self.renderer = Cutting2DRenderer()
        self.pubsub = Pubsub(self.context.event_service)
        self.pubsub.register_subscriber(self.reward_aggregator)
        self.cutting_events = self.pubsub.create_event_topic(CuttingEvents)
        self.inventory = Inventory(
            max_pieces_in_inventory, self.raw_piece_size, self.pubsub.create_event_topic(InventoryEvents)
        )
        self.current_demand: Size = self.raw_piece_size

    @override(CoreEnv)
    def reset(self) -> Cutting2DMazeState:
        self.inventory.pieces = []
        self.inventory.replenish_piece()
        self.demand_generator.reset()
        self.current_demand = self.demand_generator.next_order()
        return self.get_maze_state()

    @override(CoreEnv)
    def step(self, maze_action: Cutting2DMazeAction) -> tuple[Cutting2DMazeState, float, bool, dict[Any, Any]]:
        info = self._fulfil_order(maze_action)
        self.inventory.log_step_statistics()
        self.current_demand = self.demand_generator.next_order()
        maze_state = self.get_maze_state()
        return maze_state, float(self.reward_aggregator.summarize_reward(maze_state)), False, info

    def _fulfil_order(self, maze_action: Cutting2DMazeAction) -> dict[Any, Any]:
        if not 0 <= maze_action.piece_id < self.inventory.size():
            self.cutting_events.invalid_piece_selected()
            return {"error": "piece_id_out_of_bounds"}
        piece = self.inventory.pieces[maze_action.piece_id]
        sizes = {
            "current_demand": self.current_demand,
            "piece_to_cut": piece,
            "raw_piece_size": self.raw_piece_size,
        }
        if not self.inventory.cut(maze_action, self.current_demand):
            self.cutting_events.invalid_cut(**sizes)
            return {"error": "invalid_cut"}
        self.cutting_events.valid_cut(**sizes)
        if piece == self.raw_piece_size:
            self.inventory.replenish_piece()
        return {"msg": "valid_cut"}

    @override(CoreEnv)
    def get_maze_state(self) -> Cutting2DMazeState:
        return Cutting2DMazeState(
            tuple(self.inventory.pieces),
            self.inventory.max_pieces_in_inventory,
            self.current_demand,
            self.raw_piece_size,
        )

    @override(CoreEnv)
    def seed(self, seed: Any) -> None:
        self.demand_generator.seed(seed)

    @override(CoreEnv)
    def get_kpi_calculator(self) -> Cutting2dKpiCalculator:
        return self.kpi_calculator

    @override(CoreEnv)
    def get_renderer(self) -> Cutting2DRenderer:
        return self.renderer

    @override(CoreEnv)
    def get_serializable_components(self) -> dict[str, Any]:
        return {"inventory": self.inventory.pieces, "demand_generator": self.demand_generator}

    @override(CoreEnv)
    def clone_from(self, env: CoreEnv) -> None:
        assert isinstance(env, Cutting2DCoreEnvironment)
        self.inventory.pieces = env.inventory.pieces.copy()
        self.current_demand = env.current_demand
        self.demand_generator = env.demand_generator.copy()
        self.reward_aggregator.clone_from(env.reward_aggregator)

    @override(CoreEnv)
    def new_future(self, seed: int) -> None:
        self.demand_generator.new_future(seed)
