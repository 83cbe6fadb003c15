"""Cut the first piece on stock, fifteen times."""

from __future__ import annotations

from tutorial_maze_env.part01_core_env.env.core_env import Cutting2DCoreEnvironment
from tutorial_maze_env.part01_core_env.env.maze_action import Cutting2DMazeAction


def main() -> None:
    """Run the simulation and print the result of each step."""
    core_env = Cutting2DCoreEnvironment(max_pieces_in_inventory=200, raw_piece_size=(100, 100), static_demand=(30, 15))
    core_env.reset()
    for _ in range(15):
        maze_action = Cutting2DMazeAction(piece_id=0, rotate=False, reverse_cutting_order=False)
        _, reward, done, info = core_env.step(maze_action)
        print(f"reward {reward} | done {done} | info {info}")


if __name__ == "__main__":
    main()
