"""The comparison of flat, structured and masked policies, without its runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from maze_envs.logistics.cutting_2d.agents.greedy_policy import GreedyPolicy

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "cutting_2d.py"


@pytest.fixture(scope="module")
def comparison():
    spec = importlib.util.spec_from_file_location("cutting_2d_comparison", FILE)
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def runs(module, returns, raw_pieces=31.0, invalid=0.0):
    made = [module.Run(module.GREEDY, 0, [-38.0] * 4, [38.0] * 4, [0.0] * 4)]
    for variant, value in zip(module.TRAINED, returns, strict=True):
        for seed in range(2):
            curves = {"mean_return": [value - 1, value], "raw_pieces": [40.0, 31.0], "invalid_actions": [invalid] * 2}
            values = [value + seed] * 4
            made.append(module.Run(variant, seed, values, [raw_pieces] * 4, [invalid] * 4, [100, 200], curves))
    return made


def test_intervals_contain_the_mean_and_group_episodes_by_run(comparison):
    assert comparison.bootstrap_interval([[3.0, 3.0], [3.0, 3.0]]) == (3.0, 3.0)
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(3, 200))
    low, high = comparison.bootstrap_interval(noise + np.array([[-5.0], [0.0], [5.0]]))
    assert low < -3 < 3 < high  # three runs that differ, however many episodes
    low, high = comparison.bootstrap_interval(noise)
    assert -0.2 < low < noise.mean() < high < 0.2


@pytest.mark.parametrize(
    ("returns", "raw_pieces", "invalid", "expected"),
    [
        ((-200.0, -40.0, -31.0), 31.0, 0.0, []),
        ((-40.0, -200.0, -31.0), 31.0, 0.0, ["mean_return", "return_during_training"]),
        ((-200.0, -40.0, -36.0), 35.0, 0.0, ["not within 10 %"]),
        ((-200.0, -40.0, -31.0), 31.0, 1.0, ["invalid actions"]),
    ],
)
def test_missed_goals_are_reported(comparison, returns, raw_pieces, invalid, expected):
    missed = comparison.misses(comparison.summarize(runs(comparison, returns, raw_pieces, invalid)))
    assert len(missed) == len(expected)
    assert all(part in text for part, text in zip(expected, missed, strict=True))


def test_the_page_holds_the_table_and_the_curves(comparison):
    made = runs(comparison, (-200.0, -40.0, -31.0))
    page = comparison.html_page(made, comparison.summarize(made))
    assert "<td>structured, masked</td><td>-30.50 [-31.00, -30.00]</td>" in page
    assert page.count("<svg") == 1
    rows = comparison.table(comparison.summarize(made))
    assert [row[0] for row in rows[1:]] == ["greedy heuristic", "flat", "structured", "structured, masked"]


def test_raw_pieces_and_invalid_actions_are_counted_in_flat_and_structured_environments(comparison):
    for kind in ("maze_env.maze_env_factory", "struct_env_masked.struct_env_factory"):
        config = {
            "env": {
                "_target_": f"tutorial_maze_env.part06_struct_env.env.{kind}",
                "max_pieces_in_inventory": 50,
                "raw_piece_size": [100, 90],
                "static_demand": [[60, 30], [40, 30]],
            },
            "wrappers": {"TimeLimitWrapper": {"max_episode_steps": 60}},
        }
        run = comparison.Run("greedy", 0)
        comparison.evaluate(run, GreedyPolicy(), config, [1, 2])
        assert run.invalid_actions == [0.0, 0.0]
        assert run.raw_pieces == [-value for value in run.mean_return]
