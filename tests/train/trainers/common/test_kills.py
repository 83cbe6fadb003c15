"""The campaign of random kills, in small; ``benchmarks/kill_campaign.py`` is to be run at length by hand."""

import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[4] / "benchmarks" / "kill_campaign.py"


@pytest.mark.long
def test_runs_killed_at_random_moments_resume_to_the_same_result() -> None:
    command = [sys.executable, str(CAMPAIGN), "--kills", "4", "--algorithms", "ppo", "es"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "4 runs killed" in found.stdout
    assert "4 exact, 0 with a warning, 0 failures" in found.stdout
