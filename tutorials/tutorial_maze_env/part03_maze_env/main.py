"""Act at random in the trainable environment."""

from __future__ import annotations

from tutorial_maze_env.part03_maze_env.env.maze_env import maze_env_factory


def main() -> None:
    """Take fifteen random actions and print the result of each step."""
    env = maze_env_factory(max_pieces_in_inventory=10, raw_piece_size=(100, 100), static_demand=(30, 15))
    env.reset()
    for _ in range(15):
        _, reward, done, info = env.step(env.action_space.sample())
        print(f"reward {reward} | done {done} | info {info}")


if __name__ == "__main__":
    main()
