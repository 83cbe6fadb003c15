"""Changes to what the agent sees."""
