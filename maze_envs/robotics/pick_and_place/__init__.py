"""Pick and place on a grid: a hierarchy of tasks."""
