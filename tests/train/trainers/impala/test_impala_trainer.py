"""IMPALA's hyperparameters, life cycle and runners, on tiny runs."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_state_critic import TorchDeltaStateCritic, TorchSharedStateCritic, TorchStepStateCritic
from maze.core.errors import ConfigError, NonFiniteError
from maze.core.log_stats.log_stats import LogStatsWriter, StatsContext, register_log_stats_writer
from maze.core.utils.checkpoint import load_state
from maze.train.parallelization.distributed_actors.sequential_distributed_actors import SequentialDistributedActors
from maze.train.parallelization.distributed_actors.subproc_distributed_actors import SubprocDistributedActors
from maze.train.trainers.impala.impala_algorithm_config import ImpalaAlgorithmConfig
from maze.train.trainers.impala.impala_events import ImpalaEvents
from maze.train.trainers.impala.impala_runners import ImpalaDevRunner, ImpalaLocalRunner
from maze.train.trainers.impala.impala_trainer import IMPALA
from tests import configs
from tests.configs import cartpole_training
from tests.train.parallelization.test_distributed_actors import make_policy, subproc
from tests.train.parallelization.toy_envs import counting_env, hierarchical_env, random_walk_env, two_step_env

DOCUMENTED = {
    "n_epochs": 0,
    "epoch_length": 25,
    "patience": 15,
    "critic_burn_in_epochs": 0,
    "n_rollout_steps": 100,
    "lr": 0.0005,
    "gamma": 0.98,
    "policy_loss_coef": 1.0,
    "value_loss_coef": 0.5,
    "entropy_coef": 0.01,
    "max_grad_norm": 0,
    "device": "cpu",
    "queue_out_of_sync_factor": 1,
    "actors_batch_size": 8,
    "num_actors": 8,
    "vtrace_clip_rho_threshold": 1.0,
    "vtrace_clip_pg_rho_threshold": 1.0,
    "rollout_evaluator": {
        "_target_": "maze.train.trainers.common.evaluators.rollout_evaluator.RolloutEvaluator",
        "deterministic": True,
        "n_episodes": 8,
    },
}


@pytest.fixture(autouse=True)
def in_run_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with StatsContext():
        yield tmp_path


# -- configuration ----------------------------------------------------------------------------------


def test_documented_fields_come_first_in_order_and_with_their_defaults():
    assert ImpalaAlgorithmConfig(*DOCUMENTED.values()) == ImpalaAlgorithmConfig()
    assert [f.name for f in dataclasses.fields(ImpalaAlgorithmConfig) if not f.kw_only] == list(DOCUMENTED)


def test_the_runner_of_processes_takes_a_start_method():
    assert configs.composed("conf_train", "algorithm=impala", "runner=local").runner.start_method == "forkserver"


@pytest.mark.parametrize(
    "values",
    [
        {"actors_batch_size": 0},
        {"num_actors": 1.5},
        {"envs_per_actor": 0},
        {"queue_out_of_sync_factor": -1},
        {"vtrace_clip_rho_threshold": 0.0},
        {"vtrace_clip_pg_rho_threshold": "high"},
    ],
)
def test_invalid_values_are_refused_by_name(values):
    with pytest.raises(ConfigError, match=f"algorithm.{next(iter(values))}"):
        ImpalaAlgorithmConfig(**values)


def test_no_threshold_is_fine():
    config = ImpalaAlgorithmConfig.from_config(OmegaConf.create({"vtrace_clip_rho_threshold": None}))
    assert config.vtrace_clip_rho_threshold is None


# -- trainer ----------------------------------------------------------------------------------------


class ValueNet(nn.Module):
    def __init__(self, spaces):
        super().__init__()
        self.shapes = {key: space.shape for key, space in spaces.items()}
        self.net = nn.Linear(sum(int(np.prod(shape)) for shape in self.shapes.values()), 1)

    def forward(self, x):
        flat = [
            x[key].flatten(x[key].dim() - len(shape)) if shape else x[key][..., None]
            for key, shape in self.shapes.items()
        ]
        return {"value": self.net(torch.cat(flat, dim=-1))}


def make_model(env_factory, critic_class=TorchSharedStateCritic):
    policy = make_policy(env_factory)
    spaces = env_factory().observation_spaces_dict
    if critic_class is TorchSharedStateCritic:
        merged = {key: sub for space in spaces.values() for key, sub in space.items()}
        critic = critic_class({0: ValueNet(merged)}, spaces, "cpu", stack_observations=False)
    else:
        critic = critic_class({key: ValueNet(space) for key, space in spaces.items()}, spaces, "cpu")
    return TorchActorCritic(policy, critic, "cpu")


def make_trainer(env_factory, model=None, actors=None, checkpoint_file=None, **config):
    model = model or make_model(env_factory)
    actors = actors or SequentialDistributedActors(env_factory, model.policy, 6, 2, 3, [1, 2])
    values = {"n_epochs": 2, "epoch_length": 2, "n_rollout_steps": 6, "lr": 0.01, **config}
    return IMPALA(ImpalaAlgorithmConfig(**values), actors, None, model, None, seed=3, checkpoint_file=checkpoint_file)


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("critic_class", [TorchSharedStateCritic, TorchStepStateCritic, TorchDeltaStateCritic])
@pytest.mark.parametrize("env_factory", [partial(two_step_env, 3), random_walk_env])
def test_it_trains_all_networks_of_structured_environments(env_factory, critic_class):
    if env_factory is random_walk_env and critic_class is TorchDeltaStateCritic:
        critic_class = TorchStepStateCritic
    model = make_model(env_factory, critic_class)
    before = weights(model)
    make_trainer(env_factory, model).train()
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


@pytest.mark.parametrize("env_factory", [hierarchical_env, partial(two_step_env, 3, 1)])
def test_it_trains_where_actors_are_chosen_by_the_environment_or_steps_break_off(env_factory):
    model = make_model(env_factory, TorchStepStateCritic)
    before = weights(model)
    make_trainer(env_factory, model).train()
    assert not same(before, weights(model))


def test_two_runs_with_the_same_seeds_are_bit_identical():
    results = []
    for _ in range(2):
        trainer = make_trainer(random_walk_env, max_grad_norm=0.5)
        trainer.train()
        results.append(weights(trainer.model))
    assert same(*results)


def test_rollouts_of_the_first_policy_have_no_lag():
    model = make_model(random_walk_env)
    seeds = {"actor_env_seeds": [1], "actor_agent_seeds": [2], "queue_out_of_sync_factor": 0.0}
    actors = SubprocDistributedActors(random_walk_env, model.policy, 6, 1, 1, start_method="fork", **seeds)
    writer = Recorded()
    register_log_stats_writer(writer)
    make_trainer(random_walk_env, model, actors, n_epochs=1, epoch_length=1).train()
    assert writer.seen[ImpalaEvents.policy_lag, "max"] == 0


def test_it_trains_with_actors_in_processes_and_ends_them():
    model = make_model(random_walk_env)
    before = weights(model)
    actors = subproc(random_walk_env, model.policy, n_rollout_steps=6)
    trainer = make_trainer(random_walk_env, model, actors, n_epochs=1, epoch_length=5)
    trainer.train()
    assert actors._groups is None
    assert actors._tickets.version == 5  # not at the start
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    trainer.train()  # once more
    assert trainer.epoch == 2


class Recorded(LogStatsWriter):
    def __init__(self):
        self.seen = {}

    def write(self, path, step, stats):
        self.seen.update({(key.event, key.output_name): value for key, value in stats.items()})

    def close(self):
        pass


def test_impala_reports_the_time_of_its_parts(capsys):
    writer = Recorded()
    register_log_stats_writer(writer)
    make_trainer(counting_env).train()
    events = (
        ImpalaEvents.time_dequeuing_actors,
        ImpalaEvents.time_collecting_actors,
        ImpalaEvents.time_learner_rollout,
        ImpalaEvents.time_loss_computation,
        ImpalaEvents.time_backprob,
    )
    percents = [writer.seen[event, "percent"] for event in events]
    assert sum(percents[1:]) == pytest.approx(100.0)
    assert 0 < percents[0] <= percents[1]
    assert writer.seen[ImpalaEvents.estimated_queue_sizes, "before"] == 0
    assert writer.seen[ImpalaEvents.policy_lag, "max"] == 0


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(3)])
def test_networks_with_training_mode_are_compared_in_the_mode_of_the_actors(layer):
    model = make_model(random_walk_env)
    (key,) = model.policy.networks
    net = model.policy.networks[key].layers["push"]
    model.policy.networks[key].layers["push"] = nn.Sequential(layer, net)
    trainer = make_trainer(random_walk_env, model)
    valued = trainer._valued(trainer.rollout_generator.collect_batch().columns)
    (part,) = valued.parts
    model.eval()
    actions = [substep.action for substep in part.substeps]
    on_policy = model.evaluate(part.substeps)[0].joint_log_probs_for_actions(actions)
    for old, new in zip(part.old_log_probs, on_policy, strict=True):
        np.testing.assert_allclose(new.detach(), old, atol=1e-5)
    assert all(not target.requires_grad for target in part.targets)
    model.train()
    assert part.outputs is None  # those in evaluation mode are not what is learned from
    trained = model.evaluate(part.substeps)[0].joint_log_probs_for_actions(actions)[0]
    assert trained.requires_grad
    assert not torch.allclose(trained, on_policy[0])  # learned from as what they are in training
    trainer.rollout_generator.stop()


def test_the_value_loss_of_a_single_pass_has_no_range_to_clip_to():
    with pytest.raises(ConfigError, match=r"algorithm\.value_clip_range"):
        ImpalaAlgorithmConfig.from_config({"value_clip_range": 0.2})


def test_only_the_critic_learns_while_it_burns_in():
    trainer = make_trainer(random_walk_env, critic_burn_in_epochs=2)
    policy, critic = weights(trainer.model.policy), weights(trainer.model.critic)
    trainer.train()
    assert same(policy, weights(trainer.model.policy))
    assert not same(critic, weights(trainer.model.critic))


def test_the_first_number_that_is_not_finite_stops_training_before_anything_changes(in_run_directory):
    model = make_model(random_walk_env)
    trainer = make_trainer(random_walk_env, model, checkpoint_file=in_run_directory / "latest.pt")
    with torch.no_grad():
        next(iter(model.critic.parameters())).fill_(torch.nan)
    before = weights(model.policy)
    with pytest.raises(NonFiniteError, match=r"Epoch 1, update 1: .*non_finite_.*\.pt"):
        trainer.train()
    assert same(before, weights(model.policy))


# -- runners ----------------------------------------------------------------------------------------


def composed(**overrides):
    small = {"num_actors": 2, "actors_batch_size": 2, **overrides}
    return cartpole_training("impala", **{f"algorithm.{key}": value for key, value in small.items()})


@pytest.fixture
def start():
    runners = []

    def build(cfg, runner_class=ImpalaDevRunner, **arguments):
        runner = runner_class(eval_concurrency=1, **arguments)
        runners.append(runner)
        runner.setup(cfg)
        return runner

    yield build
    for runner in runners:
        runner.close()


def test_runs_of_the_dev_runner_with_the_same_seeds_are_bit_identical(start):
    results = []
    for _ in range(2):
        runner = start(composed(envs_per_actor=2))
        runner.run()
        results.append(weights(runner.trainer.model))
    assert same(*results)


def test_a_run_of_the_local_runner_writes_the_documented_files(start, in_run_directory, capsys):
    runner = start(composed(envs_per_actor=2), ImpalaLocalRunner)
    assert isinstance(runner.trainer.rollout_generator, SubprocDistributedActors)
    assert runner.trainer.rollout_generator.n_envs == 4
    runner.run()
    assert {"state_dict.pt", "latest.pt", "spaces_config.pkl"} <= {file.name for file in in_run_directory.iterdir()}
    assert load_state("latest.pt")["epoch"] == 1
    assert "-> new overall best model" in capsys.readouterr().out


def test_the_start_method_dummy_does_without_processes(start):
    runner = start(composed(), ImpalaLocalRunner, start_method="dummy")
    assert isinstance(runner.trainer.rollout_generator, SequentialDistributedActors)
    runner.run()


def test_a_model_without_a_critic_is_refused(start):
    cfg = composed()
    cfg.critic = None
    cfg.model.critic = None
    with pytest.raises(ConfigError, match=r"model\.critic: IMPALA needs"):
        start(cfg)


def test_a_run_starts_from_the_weights_of_another(start, in_run_directory):
    runner = start(composed())
    runner.run()
    (in_run_directory / "earlier").mkdir()
    (in_run_directory / "state_dict.pt").rename(in_run_directory / "earlier" / "state_dict.pt")
    cfg = composed()
    cfg.input_dir = str(in_run_directory / "earlier")
    again = start(cfg)
    loaded = load_state(in_run_directory / "earlier" / "state_dict.pt")
    current = again.trainer.state_dict()
    for group in loaded:
        for key, tensors in loaded[group].items():
            assert all(torch.equal(tensor, current[group][key][name]) for name, tensor in tensors.items())
