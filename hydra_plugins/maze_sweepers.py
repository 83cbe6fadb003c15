"""Register `hydra/sweeper=grid`, `nevergrad` and `optuna`."""

from maze.cli.sweeps.sweepers import GridSweep, NevergradSweep, OptunaSweep


class GridSweeper(GridSweep):
    """All combinations of values."""


class NevergradSweeper(NevergradSweep):
    """Search with Nevergrad."""


class OptunaSweeper(OptunaSweep):
    """Search with Optuna."""
