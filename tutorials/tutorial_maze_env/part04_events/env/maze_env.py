"""The trainable environment."""

from __future__ import annotations

from tutorial_maze_env.part03_maze_env.env.maze_env import Cutting2DEnvironment
from tutorial_maze_env.part03_maze_env.space_interfaces.dict_action_conversion import ActionConversion
from tutorial_maze_env.part03_maze_env.space_interfaces.dict_observation_conversion import ObservationConversion

from .core_env import Cutting2DCoreEnvironment


def maze_env_factory(
    max_pieces_in_inventory: int, raw_piece_size: tuple[int, int], static_demand: tuple[int, int]
) -> Cutting2DEnvironment:
    """Build the trainable environment from the parameters of the simulation, see `Cutting2DCoreEnvironment`."""
    return Cutting2DEnvironment(
        Cutting2DCoreEnvironment(max_pieces_in_inventory, raw_piece_size, static_demand),
        ActionConversion(max_pieces_in_inventory),
        ObservationConversion(raw_piece_size, max_pieces_in_inventory),
    )


__all__ = ["Cutting2DEnvironment", "maze_env_factory"]
