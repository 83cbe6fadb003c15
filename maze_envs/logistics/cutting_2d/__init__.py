"""Online two-dimensional cutting stock problem."""
