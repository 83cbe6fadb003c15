"""What the experiments of the example environments reach, and flat policies of the same size do not (minutes)."""

from __future__ import annotations

import pytest

from maze.maze_cli import main
from maze.utils.tensorboard_reader import tensorboard_to_pandas


def best_mean_return(experiment, directory, *overrides):
    seeds = ["seeding.env_base_seed=1", "seeding.agent_base_seed=1"]
    assert (
        main(["-cn", "conf_train", f"+experiment={experiment}", *seeds, *overrides, f"hydra.run.dir={directory}"]) == 0
    )
    return tensorboard_to_pandas(directory)["value"].loc["eval_BaseEnvEvents/reward/mean"].max()


@pytest.mark.learning
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("experiment", "reached", "flat_experiment", "missed"),
    [
        ("dispatching_ppo", 65.0, "dispatching_flat_ppo", 50.0),  # random: 39, the nearest order: 83
        ("pick_and_place_ppo", 7.0, "pick_and_place_flat_ppo", 1.0),  # random: -2, straight to the goal: 8.6
    ],
)
def test_structure_is_what_makes_the_problem_learnable(experiment, reached, flat_experiment, missed, tmp_path):
    assert best_mean_return(experiment, tmp_path / "structured") >= reached
    assert best_mean_return(flat_experiment, tmp_path / "flat") < missed


@pytest.mark.learning
@pytest.mark.timeout(1800)
def test_recurrent_ppo_solves_what_needs_a_memory_and_feed_forward_ppo_does_not(tmp_path):
    assert best_mean_return("recall_ppo", tmp_path / "recurrent") >= 0.95
    assert best_mean_return("recall_ppo", tmp_path / "feed_forward", "model.recurrence=false") < 0.35  # guessing: 0.25
