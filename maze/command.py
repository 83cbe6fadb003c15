"""The command `maze-run`; names the missing extra if only the packages for acting with bundles are installed."""

from __future__ import annotations

import sys

from maze.core.errors import install_command


def main() -> int:
    """Run :func:`maze.maze_cli.main` with the arguments of the process; return its exit status."""
    try:
        from maze.maze_cli import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("maze", "maze_envs"):
            raise
        print(f"maze-run needs {error.name}, which is not installed: {install_command('train')}", file=sys.stderr)
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
