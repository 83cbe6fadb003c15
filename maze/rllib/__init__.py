"""RLlib's algorithms on Maze environments, models and action distributions (extra `rllib`)."""
