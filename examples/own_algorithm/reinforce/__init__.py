"""REINFORCE with a baseline: an algorithm on top of Maze."""
