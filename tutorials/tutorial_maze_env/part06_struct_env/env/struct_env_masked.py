"""The cutting problem with two sub-steps and masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.maze_env import MazeEnv

from .maze_env import maze_env_factory
from .struct_env import CUTTING, SELECTION, Observation, StructuredCutting2DEnvironment


class MaskedStructuredCutting2DEnvironment(StructuredCutting2DEnvironment):
    """Masks pieces that are too small, and rotations that do not fit into the selected one.

    :param maze_env: The flat environment.
    """

    def __init__(self, maze_env: MazeEnv[Any]) -> None:
        super().__init__(maze_env)
        slots = maze_env.action_space["piece_idx"]
        assert isinstance(slots, spaces.Discrete)
        self._add_to_space(SELECTION, "inventory_mask", int(slots.n))
        self._add_to_space(CUTTING, "cutting_mask", 2)

    def _add_to_space(self, step_key: int, name: str, n_actions: int) -> None:
        mask = spaces.Box(0, 1, shape=(n_actions,), dtype=np.float32)
        self._observation_spaces_dict[step_key] = spaces.Dict({**self._observation_spaces_dict[step_key], name: mask})

    @staticmethod
    @override(StructuredCutting2DEnvironment)
    def _obs_selection_step(flat_obs: Observation) -> Observation:
        widths, heights = flat_obs["inventory"].T
        width, height = flat_obs["ordered_piece"].tolist()
        # Empty slots are zero in both directions, and too small for any order.
        fits = (widths >= width) & (heights >= height)
        fits |= (widths >= height) & (heights >= width)  # turned
        return {**flat_obs, "inventory_mask": fits.astype(np.float32)}

    @staticmethod
    @override(StructuredCutting2DEnvironment)
    def _obs_cutting_step(flat_obs: Observation, selected_piece_idx: int) -> Observation:
        piece, order = flat_obs["inventory"][selected_piece_idx], flat_obs["ordered_piece"]
        (piece_width, piece_height), (width, height) = piece.tolist(), order.tolist()
        fits_as_it_is = width <= piece_width and height <= piece_height
        fits_turned = height <= piece_width and width <= piece_height
        mask = np.array((fits_as_it_is, fits_turned), dtype=np.float32)
        return {"selected_piece": piece, "ordered_piece": order, "cutting_mask": mask}


def struct_env_factory(
    max_pieces_in_inventory: int, raw_piece_size: tuple[int, int], static_demand: Sequence[tuple[int, int]]
) -> MaskedStructuredCutting2DEnvironment:
    """Build the masked environment from the parameters of the simulation, see `Cutting2DCoreEnvironment`."""
    flat_env = maze_env_factory(max_pieces_in_inventory, raw_piece_size, static_demand)
    return MaskedStructuredCutting2DEnvironment(flat_env)
