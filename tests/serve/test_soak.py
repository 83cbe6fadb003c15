"""Six seconds of what `benchmarks/serve_soak.py` does for ten."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.serve_soak import MOST_GROWTH_MIB, growth, soak


@pytest.mark.long
def test_actions_are_correct_while_clients_connect_and_disconnect_and_bundles_are_swapped(tmp_path: Path) -> None:
    work, memory = soak(tmp_path, seconds=6.0, n_sessions=20, swap_seconds=0.5)
    assert work.problems == []
    assert growth(memory) < MOST_GROWTH_MIB
    assert work.counts["swaps"] >= 5
    for what in ("alone", "together", "in sessions", "hung up", "nonsense"):
        assert work.counts[what] > 10, what
