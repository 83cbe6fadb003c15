"""Act at random and print statistics; the reward comes from the aggregator."""

from __future__ import annotations

from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.utils.log_stats_utils import SimpleStatsLoggingSetup
from tutorial_maze_env.part05_reward.env.maze_env import maze_env_factory


def main() -> None:
    """Take fifteen random actions."""
    env = LogStatsWrapper(
        maze_env_factory(max_pieces_in_inventory=200, raw_piece_size=(100, 100), static_demand=(30, 15)),
        logging_prefix="main",
    )
    with SimpleStatsLoggingSetup(env):
        env.reset()
        for _ in range(15):
            env.step(env.action_space.sample())


if __name__ == "__main__":
    main()
