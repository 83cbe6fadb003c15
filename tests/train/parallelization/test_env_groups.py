"""Environments in groups: what is learned depends on the grouping, and not on where the groups are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.train.parallelization.placement import InProcess, Processes, placement_of
from tests.train.parallelization.placements import differing, recorded_by, trained
from tests.train.parallelization.toy_policies import ENVS, make_policy


@pytest.mark.parametrize("name", ENVS)
def test_groups_in_processes_report_the_statistics_of_groups_in_this_process(name: str) -> None:
    here, elsewhere = InProcess(), Processes()
    here.env_groups = elsewhere.env_groups = 2
    assert recorded_by(here, name) == recorded_by(elsewhere, name)


def test_the_grouping_decides_what_is_plotted() -> None:
    together, apart = InProcess(), InProcess()
    apart.env_groups = 2
    assert recorded_by(together, "flat") != recorded_by(apart, "flat")


def test_a_single_environment_is_not_grouped() -> None:
    placement = InProcess()
    placement.env_groups = 4
    assert not placement.vector_env(ENVS["flat"], 1).acts


def test_groups_cannot_be_stepped_singly() -> None:
    placement = InProcess()
    placement.env_groups = 2
    env = placement.vector_env(ENVS["flat"], 2)
    with pytest.raises(EnvironmentContractError, match=r"runner\.env_groups=1"):
        env.step({"push": np.zeros((2, 3))})
    env.close()


def test_an_error_names_the_group() -> None:
    placement = InProcess()
    placement.env_groups = 2
    env = placement.vector_env(ENVS["flat"], 2)
    env.seed([1, 2])
    policy = make_policy(ENVS["flat"])
    columns = RolloutGenerator(env).allocate(4)
    for parameter in policy.parameters():
        parameter.data.fill_(float("nan"))
    with pytest.raises(Exception, match="Group 0, environment 0"):
        env.roll_out(policy, columns, begins=True)
    env.close()


def test_run_with_groups_resumes_exactly(tmp_path: Path) -> None:
    options = ["algorithm=a2c", "runner.concurrency=3", "runner.env_groups=2", "algorithm.n_rollout_steps=10"]
    whole = trained(tmp_path / "whole", *options)
    trained(tmp_path / "first", *options, "algorithm.n_epochs=1")
    resumed = trained(tmp_path / "second", *options, f"input_dir={tmp_path / 'first'}", "resume=true")
    weights = [place for place in differing(whole, resumed) if "/model/" in place or "/parts/" in place]
    assert not weights


def test_unknown_placements_and_addresses_out_of_place_are_refused() -> None:
    with pytest.raises(ConfigError, match="in_process, processes, batched, ray"):
        placement_of("cloud")
    with pytest.raises(ConfigError, match=r"runner\.address.*needs runner=ray; found the placement InProcess"):
        placement_of("in_process", "auto")
