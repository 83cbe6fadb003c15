"""Register `hydra/sweeper=grid`, `nevergrad` and `optuna`."""

from maze.cli.sweeps.sweepers import GridSweep, SearchSweep


class GridSweeper(GridSweep):
    """All combinations of values."""


class NevergradSweeper(SearchSweep):
    """Search with Nevergrad."""


class OptunaSweeper(SearchSweep):
    """Search with Optuna."""
