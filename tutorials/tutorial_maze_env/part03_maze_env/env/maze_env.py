"""The trainable environment."""

from __future__ import annotations

from maze.core.env.action_conversion import ActionConversionInterface
from maze.core.env.core_env import CoreEnv
from maze.core.env.maze_env import MazeEnv
from maze.core.env.observation_conversion import ObservationConversionInterface
from tutorial_maze_env.part03_maze_env.space_interfaces.dict_action_conversion import ActionConversion
from tutorial_maze_env.part03_maze_env.space_interfaces.dict_observation_conversion import ObservationConversion

from .core_env import Cutting2DCoreEnvironment


class Cutting2DEnvironment(MazeEnv[CoreEnv]):
    """The cutting simulation with observations and actions.

    :param core_env: The simulation.
    :param action_conversion: From the agent's actions to cuts.
    :param observation_conversion: From states to the agent's observations.
    """

    def __init__(
        self,
        core_env: CoreEnv,
        action_conversion: ActionConversionInterface,
        observation_conversion: ObservationConversionInterface,
    ) -> None:
        super().__init__(
            core_env=core_env,
            action_conversion_dict={0: action_conversion},
            observation_conversion_dict={0: observation_conversion},
        )


def maze_env_factory(
    max_pieces_in_inventory: int, raw_piece_size: tuple[int, int], static_demand: tuple[int, int]
) -> Cutting2DEnvironment:
    """Build the trainable environment from the parameters of the simulation, see `Cutting2DCoreEnvironment`."""
    return Cutting2DEnvironment(
        Cutting2DCoreEnvironment(max_pieces_in_inventory, raw_piece_size, static_demand),
        ActionConversion(max_pieces_in_inventory),
        ObservationConversion(raw_piece_size, max_pieces_in_inventory),
    )
