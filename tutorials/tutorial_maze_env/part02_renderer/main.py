"""Cut the first piece in stock fifteen times and show each cut."""

from __future__ import annotations

from tutorial_maze_env.part02_renderer.env.core_env import Cutting2DCoreEnvironment
from tutorial_maze_env.part02_renderer.env.maze_action import Cutting2DMazeAction


def main() -> None:
    """Run the simulation, draw each state with its cut, and print the result of each step."""
    core_env = Cutting2DCoreEnvironment(max_pieces_in_inventory=200, raw_piece_size=(100, 100), static_demand=(30, 15))
    maze_state = core_env.reset()
    for _ in range(15):
        maze_action = Cutting2DMazeAction(piece_id=0, rotate=False, reverse_cutting_order=False)
        core_env.renderer.render(maze_state, maze_action, None)
        maze_state, reward, done, info = core_env.step(maze_action)
        print(f"reward {reward} | done {done} | info {info}")


if __name__ == "__main__":
    main()
