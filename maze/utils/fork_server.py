"""The fork server that worker processes come from; it imports this module when it starts."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from typing import Any


def preload(context: Any, modules: Iterable[str]) -> None:
    """Have the fork server import what its processes need, once for all, and outlive signals to its process group.

    A signal to the whole group ends the fork server, and multiprocessing takes the processes that come from it for dead
    as well. It belongs to the parent to end them, which may have an update to finish first.

    :param context: A multiprocessing context.
    :param modules: What to import.
    """
    context.set_forkserver_preload([__name__, *modules])


def _ignore_termination() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # what comes from this server may not be ours, and has the usual ways
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    _ignore_termination()
