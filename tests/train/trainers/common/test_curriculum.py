"""Curricula: environments that change with the epochs, wherever they are stepped, and runs that go on exactly."""

from __future__ import annotations

import pytest
import torch

from maze.core.utils.checkpoint import load_state
from maze.maze_cli import main
from maze.report.progress import read_progress

STAGES = "curriculum=[{n_epochs:1,env:{n_jobs:3}},{n_epochs:2,env:{n_jobs:4,n_machines:3}}]"
TRAINING = (
    *("-cn", "conf_train", "+experiment=job_shop_ppo", "env.n_jobs=5", "env.n_machines=2", "env.only_choices=false"),
    *("model.hidden_units=[8]", "algorithm.n_rollout_steps=30", "algorithm.epoch_length=2", "algorithm.batch_size=60"),
    *(
        "algorithm.n_optimization_epochs=1",
        "algorithm.rollout_evaluator.n_episodes=1",
        "algorithm.lr_schedule=constant",
    ),
    *("runner.concurrency=4", "runner.eval_concurrency=1", "seeding.env_base_seed=1", "seeding.agent_base_seed=2"),
)

LENGTH = "BaseEnvEvents/reward/mean_step_count"
N_STEPS = "BaseEnvEvents/reward/total_step_count"


def train(directory, *overrides):
    return main([*TRAINING, f"hydra.run.dir={directory}", *overrides])


def weights(directory):
    model = load_state(directory / "latest.pt")["model"]
    return {(part, key): value for part, of_part in model.items() for key, value in tensors(of_part)}


def tensors(state):
    """Tensors of nested dictionaries."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", tensor) for inner, tensor in tensors(value))
        else:
            yield key, value


def statistic(directory, name, path="train"):
    return [values[name] for where, *_, values in read_progress(directory).rows() if where == path and name in values]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "n_epochs"),
    [  # interrupted at the end of a stage, in its middle, and at the end of the last one
        (["runner.placement=batched"], 1),
        (["runner.placement=in_process"], 2),
        pytest.param(["runner=local", "runner.placement=processes"], 3, marks=pytest.mark.long),
    ],
)
def test_run_resumed_within_its_curriculum_equals_an_uninterrupted_one(tmp_path, placement, n_epochs):
    whole, part = tmp_path / "whole", tmp_path / "part"
    train(whole, *placement, STAGES, "algorithm.n_epochs=4")
    assert statistic(whole, "ActorCriticEvents/curriculum_stage") == [0, 1, 1, 2]
    # episodes of a stage have as many steps as its shops have operations; evaluations as configured
    assert statistic(whole, LENGTH) == [6, 12, 12, 10]
    assert set(statistic(whole, LENGTH, "eval")) == {10}
    assert statistic(whole, N_STEPS) == sorted(set(statistic(whole, N_STEPS)))  # totals go on
    train(part, *placement, STAGES, f"algorithm.n_epochs={n_epochs}")
    train(part / "rest", *placement, STAGES, "algorithm.n_epochs=4", f"input_dir={part}", "resume=true")
    rest = weights(part / "rest")
    assert len(rest) > 4
    assert all(torch.equal(value, rest[key]) for key, value in weights(whole).items())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["curriculum=often"], "curriculum: expected a list of stages"),
        (["curriculum=[{n_epochs:0}]"], "curriculum.n_epochs: expected"),
        (["curriculum=[{epochs:1}]"], "curriculum.epochs: Stage has no such field"),
        (["curriculum=[{env:[1]}]"], "curriculum.env: expected arguments of the environment by name"),
        (["curriculum=[{env:{n_jobz:3}}]"], "n_jobz"),
        (["curriculum=[{env:{_target_:maze_envs.packing.bin_packing.BinPackingEnv}}]"], "n_jobs"),
    ],
)
def test_invalid_curricula_are_refused_with_the_reason(tmp_path, overrides, message, capsys):
    assert train(tmp_path / "run", *overrides) > 0
    assert message in capsys.readouterr().err


def test_environments_that_the_model_cannot_act_in_are_refused(tmp_path, capsys):
    stages = "curriculum=[{n_epochs:1,env:{lead_time:2}}]"
    assert main(["-cn", "conf_train", "+experiment=lost_sales_ppo", f"hydra.run.dir={tmp_path / 'run'}", stages]) == 1
    said = capsys.readouterr().err
    assert "curriculum[0].env: the model cannot act in these environments. observation 'stock'" in said


def test_algorithms_that_cannot_change_their_environments_refuse(tmp_path, capsys):
    stages = "curriculum=[{n_epochs:1,env:{render_mode:rgb_array}}]"
    command = ["-cn", "conf_train", "env.name=CartPole-v1", "algorithm=impala", f"hydra.run.dir={tmp_path / 'run'}"]
    assert main([*command, stages]) == 1
    assert "curriculum: IMPALA supports no curriculum" in capsys.readouterr().err
