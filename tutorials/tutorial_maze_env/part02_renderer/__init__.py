"""Drawing the simulation."""
