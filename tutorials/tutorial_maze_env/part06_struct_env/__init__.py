"""Sub-steps and action masks."""
