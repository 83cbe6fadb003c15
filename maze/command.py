"""The command `maze-run`; names the missing extra if only the packages for acting with bundles are installed."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from typing import Any

from maze.core.errors import install_command

# Uploads and simulators that end by themselves have this long.
_GRACE_SECONDS = 30


def main() -> int:
    """Run :func:`maze.maze_cli.main` with the arguments of the process; return its exit status."""
    try:
        from maze.maze_cli import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("maze", "maze_envs"):
            raise
        print(f"maze-run needs {error.name}, which is not installed: {install_command('train')}", file=sys.stderr)
        return 1
    status = run()
    threading.Thread(target=_end_in_time, args=(status,), daemon=True).start()
    return status


def _end_in_time(status: int) -> None:
    """End the process if threads or child processes, such as those of an environment, outlive the command."""
    threading.main_thread().join()  # the interpreter then waits for the others
    time.sleep(_GRACE_SECONDS)
    children = multiprocessing.active_children()
    running: list[Any] = [*threading.enumerate(), *children]
    if left := [each.name for each in running if each.is_alive() and not each.daemon]:
        what = f"maze-run ends without {', '.join(left)}, which did not end in {_GRACE_SECONDS} s"
        print(f"{what}. Environments end their threads and processes in `close`.", file=sys.stderr, flush=True)
        for child in children:
            child.kill()
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
