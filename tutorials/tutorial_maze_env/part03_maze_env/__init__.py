"""Observations, actions, and a first training."""
