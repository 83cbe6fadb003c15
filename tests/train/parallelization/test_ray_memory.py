"""Memory of learner and object store, in short; ``benchmarks/ray_memory.py`` does it at length."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

MEMORY = Path(__file__).parents[3] / "benchmarks" / "ray_memory.py"


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")
def test_memory_does_not_grow_where_the_learner_is_slower_than_the_actors() -> None:
    command = [sys.executable, str(MEMORY), "ppo", "slow", "--updates", "40", "--seconds", "2.5"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert found.returncode == 0, found.stdout + found.stderr[-3000:]
    assert found.stdout.count(" times") == 4
