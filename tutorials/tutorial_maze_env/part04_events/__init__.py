"""Events and key performance indicators."""
