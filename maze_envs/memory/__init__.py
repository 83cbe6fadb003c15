"""Problems that nobody solves who forgets what was seen before."""
