"""Scripts that run as processes of their own, without each of them importing torch and its like again."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_WARNINGS = "error::DeprecationWarning:maze"
_SERVE = """
import contextlib, json, os, runpy, sys, warnings

for name in ("torch", "torch.utils.tensorboard", "gymnasium", "hydra", "pandas", "matplotlib.figure"):
    with contextlib.suppress(ImportError):
        __import__(name)

def run(script, directory, environment, output, errors):
    for target, path in ((0, os.devnull), (1, output), (2, errors)):
        descriptor = os.open(path, os.O_RDWR)
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [script]
    sys.path[:1] = [os.path.dirname(script), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    runpy.run_path(script, run_name="__main__")

requests = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
while request := requests[0].readline():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        process = os.fork()
    if not process:
        os.setsid()
        for file in requests:
            file.close()
        del requests
        run(*json.loads(request))
        break
    print(process, file=requests[1])
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), file=requests[1])
"""


def run_script(
    script: Path, directory: Path, environment: Mapping[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Runs a script to its end, as `python <script>` would.

    It is run by a copy of an interpreter that has imported other people's large packages, but nothing of Maze.

    :param script: The script.
    :param directory: Its working directory.
    :param environment: All of its environment variables; `None`: those of this process.
    :param timeout: Seconds until it is killed, with the processes it has started.
    """
    environment = dict(os.environ if environment is None else environment)
    server = _server()
    with tempfile.TemporaryDirectory() as place:
        output, errors = (Path(place, name) for name in ("output", "errors"))
        for file in (output, errors):
            file.touch()
        request = (str(script), str(directory), environment, str(output), str(errors))
        server.stdin.write(f"{json.dumps(request)}\n".encode())
        process = int(server.stdout.readline())
        if not select.select([server.stdout], [], [], timeout)[0]:
            os.killpg(process, signal.SIGKILL)
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess([str(script)], status, output.read_text("utf-8"), errors.read_text("utf-8"))


@cache
def _server() -> Any:
    server = subprocess.Popen(
        [sys.executable, "-W", _WARNINGS, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    atexit.register(server.kill)
    return server
