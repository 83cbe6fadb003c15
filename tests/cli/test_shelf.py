"""The shelf: bundles that are part of Maze, by name in every command."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.shelf import ENTRIES, shelf_table
from maze.core.agent_deployment.agent_deployment import AgentDeployment
from maze.core.errors import ConfigError
from maze.maze_cli import main
from maze.serve.bundle import PolicyBundle, bundle_path, shelf

ROOT = Path(__file__).resolve().parents[2]
BUNDLES = sorted(shelf())


def test_the_shelf_is_small_and_complete() -> None:
    assert set(BUNDLES) == set(ENTRIES)
    assert sum(path.stat().st_size for path in shelf().values()) < 5_000_000


@pytest.mark.parametrize("name", BUNDLES)
def test_a_bundle_acts_as_the_trained_policy_did_in_recorded_states(name: str) -> None:
    start = time.process_time()
    bundle = PolicyBundle.load(f"shelf:{name}")  # compares checksums, and logits of the trained policy
    assert time.process_time() - start < 0.5
    assert bundle.card["name"] == name
    assert sum(len(next(iter(case["logits"].values()))) for case in bundle.reference) >= 64


@pytest.mark.parametrize("name", BUNDLES)
def test_cards_state_problem_result_and_command(name: str) -> None:
    card = PolicyBundle.load(f"shelf:{name}", check=False).card
    facts = card["shelf"]
    assert card["command"].startswith("maze-run -cn conf_train +experiment=")
    (own, low, high), (heuristic, *_) = facts["results"]
    assert low <= own <= high
    assert own < heuristic
    assert "_target_" in facts["env"]


def test_a_rollout_takes_the_environment_of_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["runner=sequential", "runner.n_episodes=2", "runner.max_episode_steps=20"]
    assert main(["policy=shelf:lost_sales", *short]) == 0
    assert "average_cost" in capfd.readouterr().out
    compare = ["-cn", "conf_compare", "policies=[shelf:lost_sales,base_stock]", "runner.n_episodes=2"]
    assert main([*compare, "runner.max_episode_steps=20", "hydra.run.dir=compared"]) == 0
    assert "shelf:lost_sales" in (tmp_path / "compared" / "comparison.csv").read_text()
    assert main(["policy=shelf:job_shops", *short]) != 0
    assert "Did you mean `job_shop`" in capfd.readouterr().err
    assert main(["policy=shelf:lost_sales", "env.name=CartPole-v1", *short]) != 0


def test_a_deployment_acts_by_name() -> None:
    env = PolicyBundle.load("shelf:lost_sales").card["shelf"]["env"]
    deployment = AgentDeployment.from_bundle("shelf:lost_sales", env)
    assert deployment.policy is not None
    deployment.close(0, True, {})
    with pytest.raises(ConfigError, match=r"shelf 'nothing' is unknown\. Known: "):
        bundle_path("shelf:nothing")


def test_the_listing_and_the_page_follow_from_the_cards(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--shelf"]) == 0
    out = capfd.readouterr().out
    for name in BUNDLES:
        assert name in out
        assert PolicyBundle.load(f"shelf:{name}", check=False).card["command"] in out
    assert shelf_table() in (ROOT / "docs" / "guide" / "operations.md").read_text(encoding="utf-8")
    assert main(["--shelf", "nothing"]) == 2
    assert "--shelf: shelf 'nothing' is unknown" in capfd.readouterr().err
