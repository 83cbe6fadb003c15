"""Take one step of each structured environment and print the spaces of its sub-steps."""

from __future__ import annotations

from tutorial_maze_env.part06_struct_env.env.struct_env import StructuredCutting2DEnvironment, struct_env_factory
from tutorial_maze_env.part06_struct_env.env.struct_env_masked import struct_env_factory as masked_struct_env_factory


def show_sub_steps(struct_env: StructuredCutting2DEnvironment) -> None:
    """Take the two sub-steps of the first step at random."""
    observation = struct_env.reset()
    for number in (1, 2):
        print(f"action_space {number}:      {struct_env.action_space}")
        print(f"observation_space {number}: {struct_env.observation_space}")
        print(f"observation {number}:       {observation.keys()}")
        observation, *_ = struct_env.step(struct_env.action_space.sample())


def main() -> None:
    """Show the environment without masks, then the one with masks."""
    for factory in (struct_env_factory, masked_struct_env_factory):
        show_sub_steps(factory(max_pieces_in_inventory=200, raw_piece_size=(100, 100), static_demand=[(30, 15)]))


if __name__ == "__main__":
    main()
