"""Actors and nodes of Ray killed at random, in short; ``benchmarks/ray_kill_campaign.py`` does it at length."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[3] / "benchmarks" / "ray_kill_campaign.py"


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")
def test_a_run_whose_actors_are_killed_ends_and_loses_nothing() -> None:
    options = ["--every", "1", "--kills", "1", "--actors", "2", "--epochs", "1"]
    command = [sys.executable, str(CAMPAIGN), "ppo", *options]
    found = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
    assert found.returncode == 0, found.stdout + found.stderr[-3000:]
    assert re.search(r", [1-9]\d* actors and 0 nodes killed, [1-9]\d* actors replaced.*: passed", found.stdout)
