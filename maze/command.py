"""The command `maze-run`, which says what to install where only the part for acting with bundles is."""

from __future__ import annotations

import sys

from maze.core.errors import install_command


def main() -> int:
    """Runs :func:`maze.maze_cli.main` with the arguments of the process, and returns its exit status."""
    try:
        from maze.maze_cli import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("maze", "maze_envs"):
            raise
        print(f"maze-run needs {error.name}, which is not installed: {install_command('train')}", file=sys.stderr)
        return 1
    return run()
