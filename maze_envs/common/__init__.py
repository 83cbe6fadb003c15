"""Code that the environments share."""
