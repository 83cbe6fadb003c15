"""Jobs that Maze does not know."""
