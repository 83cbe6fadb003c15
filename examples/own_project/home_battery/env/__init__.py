"""The house as an environment."""
