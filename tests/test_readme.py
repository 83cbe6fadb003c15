"""The README: its example runs and is served by its commands; the extras that it installs exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from importlib.metadata import metadata
from pathlib import Path

import httpx
import pytest

from tests.scripts import run_script
from tests.test_documentation import BLOCK, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (.*)$", README, re.MULTILINE)


def command(prefix: str) -> list[str]:
    """Return the words of the only command of the README that begins so."""
    (found,) = [each for each in COMMANDS if each.startswith(prefix)]
    return shlex.split(found)


def test_every_command_of_the_readme_is_covered_here() -> None:
    assert [each.split()[0] for each in COMMANDS] == ["pip", "pip", "python", "maze-serve", "curl"]


def test_the_extras_named_by_the_readme_exist() -> None:
    (extras,) = re.findall(r"\[(.*)\]", command("pip install -e")[-1])
    assert set(extras.split(",")) <= set(metadata("maze-rl").get_all("Provides-Extra") or ())


@pytest.mark.slow
def test_the_example_of_the_readme_trains_compares_exports_and_is_served(tmp_path: Path) -> None:
    for extra in ("onnxscript", "uvicorn"):
        pytest.importorskip(extra)
    (listing,) = BLOCK.findall(README)
    assert listing.count("n_steps=150_000") == 1
    script = tmp_path / command("python ")[1]
    script.write_text(listing.replace("n_steps=150_000", "n_steps=1_000"), encoding="utf-8")
    finished = run_script(script, tmp_path, {**os.environ})
    assert finished.returncode == 0, f"{finished.stdout[-1500:]}\n{finished.stderr[-3000:]}"

    _, bundle, option, port = command("maze-serve")
    _, _, body, url = command("curl")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        free_port = str(free.getsockname()[1])
    serve = [sys.executable, "-c", "import sys; from maze.serve.server import main; sys.exit(main())"]
    server = subprocess.Popen([*serve, bundle, option, free_port], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        assert f":{port}/" in url
        for _ in range(200):
            try:
                answer = httpx.post(url.replace(f":{port}/", f":{free_port}/"), json=json.loads(body))
                break
            except httpx.ConnectError:
                time.sleep(0.1)
        assert 0 <= answer.json()["action"] < 16
    finally:
        server.terminate()
        server.wait(timeout=20)
