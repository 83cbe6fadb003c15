"""The simulation, with events and a KPI."""

from __future__ import annotations

from typing import Any

from maze.core.annotations import override
from maze.core.env.core_env import CoreEnv
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.events.pubsub import Pubsub

from .events import CuttingEvents, InventoryEvents
from .inventory import Inventory
from .kpi_calculator import Cutting2dKpiCalculator
from .maze_action import Cutting2DMazeAction
from .maze_state import Cutting2DMazeState
from .renderer import Cutting2DRenderer


class Cutting2DCoreEnvironment(CoreEnv):
    """Fulfils one customer order per step by cutting a piece on stock, and fires an event for whatever happens.

    There is always a raw piece on stock: when it is cut, another one is delivered. The reward is -1 for each delivery
    and -2 for a cut that is not possible.

    :param max_pieces_in_inventory: Capacity of the stock. When it is exceeded the oldest pieces are thrown away.
    :param raw_piece_size: Size of a raw piece.
    :param static_demand: Size of the piece that is ordered in every step.
    """

    def __init__(
        self, max_pieces_in_inventory: int, raw_piece_size: tuple[int, int], static_demand: tuple[int, int]
    ) -> None:
        super().__init__()
        self.max_pieces_in_inventory = max_pieces_in_inventory
        self.raw_piece_size = (raw_piece_size[0], raw_piece_size[1])
        self.current_demand = (static_demand[0], static_demand[1])
        self.renderer = Cutting2DRenderer()
        self.kpi_calculator = Cutting2dKpiCalculator()
        self.pubsub = Pubsub(self.context.event_service)
        self.inventory_events = self.pubsub.create_event_topic(InventoryEvents)
        self.cutting_events = self.pubsub.create_event_topic(CuttingEvents)
        self._setup_env()

    def _setup_env(self) -> None:
        self.inventory = Inventory(self.max_pieces_in_inventory, self.raw_piece_size, self.inventory_events)
        self.inventory.replenish_piece()

    @override(CoreEnv)
    def step(self, maze_action: Cutting2DMazeAction) -> tuple[Cutting2DMazeState, float, bool, dict[Any, Any]]:
        reward = self._fulfil_order(maze_action)
        self.inventory.log_step_statistics()
        return self.get_maze_state(), reward, False, {}

    def _fulfil_order(self, maze_action: Cutting2DMazeAction) -> float:
        """Cut, replace a used raw piece, and return the reward."""
        if maze_action.piece_id >= self.inventory.size():
            self.cutting_events.invalid_piece_selected()
            return 0
        piece_to_cut = self.inventory.pieces[maze_action.piece_id]
        sizes = {
            "current_demand": self.current_demand,
            "piece_to_cut": piece_to_cut,
            "raw_piece_size": self.raw_piece_size,
        }
        if not self.inventory.cut(maze_action, self.current_demand):
            self.cutting_events.invalid_cut(**sizes)
            return -2
        self.cutting_events.valid_cut(**sizes)
        if piece_to_cut != self.raw_piece_size:
            return 0
        self.inventory.replenish_piece()
        return -1

    @override(CoreEnv)
    def get_maze_state(self) -> Cutting2DMazeState:
        return Cutting2DMazeState(
            self.inventory.pieces, self.max_pieces_in_inventory, self.current_demand, self.raw_piece_size
        )

    @override(CoreEnv)
    def get_kpi_calculator(self) -> Cutting2dKpiCalculator:
        return self.kpi_calculator

    @override(CoreEnv)
    def get_renderer(self) -> Cutting2DRenderer:
        return self.renderer

    @override(CoreEnv)
    def reset(self) -> Cutting2DMazeState:
        self._setup_env()
        return self.get_maze_state()

    @override(CoreEnv)
    def close(self) -> None:
        """Nothing to release."""

    @override(CoreEnv)
    def seed(self, seed: Any) -> None:
        """Do nothing: nothing is random here."""

    @override(CoreEnv)
    def get_serializable_components(self) -> dict[str, Any]:
        return {"inventory": self.inventory.pieces}

    @override(CoreEnv)
    def is_actor_done(self) -> bool:
        return False

    @override(CoreEnv)
    def actor_id(self) -> ActorID:
        return ActorID(step_key=0, agent_id=0)

    @property
    @override(CoreEnv)
    def agent_counts_dict(self) -> dict[StepKeyType, int]:
        return {0: 1}

    @override(CoreEnv)
    def clone_from(self, env: CoreEnv) -> None:
        assert isinstance(env, Cutting2DCoreEnvironment)
        self.inventory.pieces = env.inventory.pieces.copy()
        self.current_demand = env.current_demand
