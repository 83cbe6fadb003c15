"""The simulation: pieces, cuts and rewards."""
