"""Optional packages."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from maze.cli.errors import UsageError


class MissingPackageError(UsageError, ImportError):
    """A package is not installed that only some uses of Maze need."""


def required(package: str, purpose: str) -> Any:
    """Imports a package of the extra ``hpo``.

    :param purpose: What needs it.
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        raise MissingPackageError(
            f'{purpose} needs the package {package}, which is not installed: pip install "maze-rl[hpo]"'
        ) from error
