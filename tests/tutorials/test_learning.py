"""The documented result of the tutorial (minutes)."""

from __future__ import annotations

import pytest

from maze.maze_cli import main
from maze.utils.tensorboard_reader import tensorboard_to_pandas


@pytest.mark.learning
@pytest.mark.timeout(1800)
def test_masked_policy_makes_no_invalid_cuts_and_is_close_to_the_optimum(tmp_path):
    seeds = ["seeding.env_base_seed=1", "seeding.agent_base_seed=1"]
    run = ["+experiment=tutorial_cutting_2d_struct_masked", "algorithm.n_epochs=6", f"hydra.run.dir={tmp_path / 'run'}"]
    assert main(["-cn", "conf_train", *run, *seeds]) == 0
    values = tensorboard_to_pandas(tmp_path / "run")["value"]
    tags = set(values.index.get_level_values("tag"))
    # From the first step on: events that never occurred have no statistics.
    assert not [tag for tag in tags if "invalid_" in tag]
    n_raw_pieces = values.loc["train_InventoryEvents/piece_replenished/mean_episode_total"]
    assert n_raw_pieces.iloc[-1] <= 1.1 * 31
    assert values.loc["eval_BaseEnvEvents/reward/mean"].max() >= -1.1 * 31
