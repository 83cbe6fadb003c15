"""Training with evolution strategies: reproducible, resumable, and refusing what cannot be learned from."""

import copy
import os
import signal
import threading
from functools import partial

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module

from maze.core.agent.policy import Policy
from maze.core.agent.torch_model import TorchModel
from maze.core.errors import ConfigError, NonFiniteError
from maze.core.log_stats.log_stats import LogStatsWriter, StatsContext
from maze.core.utils.checkpoint import load_state
from maze.core.utils.factory import Factory
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.runner import Runner
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
from maze.train.trainers.es import ESDevRunner, ESEvents, ESTrainer, SharedNoiseTable
from maze.train.trainers.es.distributed.es_distributed_rollouts import ESDistributedRollouts, ESRolloutResult
from maze.train.trainers.es.distributed.es_dummy_distributed_rollouts import ESDummyDistributedRollouts
from maze.train.trainers.es.es_utils import get_flat_parameters
from maze.train.utils.run_process import TrainingInterrupted
from tests.train.parallelization.toy_envs import counting_env, random_walk_env, two_step_env
from tests.train.trainers.es.populations import build_policy

NOISE = SharedNoiseTable(100_000)
cartpole = partial(GymMazeEnv, "CartPole-v1")


def rollouts_of(make_env, n_eval_rollouts=2):
    return ESDummyDistributedRollouts(make_env(), n_eval_rollouts, NOISE, 7, env_factory=make_env, env_seed=3)


def build_trainer(make_env=cartpole, checkpoint_file=None, **config):
    return build_trainer_of(build_policy(make_env()), checkpoint_file, **config)


def build_trainer_of(policy, checkpoint_file=None, **config):
    values = {"n_rollouts_per_update": 4, "max_steps": 20, **config}
    return ESTrainer(values, policy, NOISE, None, checkpoint_file=checkpoint_file)


def trained(n_epochs=3, make_env=cartpole, **config):
    trainer = build_trainer(make_env, **config)
    trainer.train(rollouts_of(make_env), n_epochs=n_epochs)
    return trainer


def test_two_runs_with_the_same_seeds_are_equal_bit_for_bit():
    assert torch.equal(get_flat_parameters(trained().policy), get_flat_parameters(trained().policy))


@pytest.mark.parametrize("make_env", [two_step_env, random_walk_env])
def test_structured_and_continuous_environments_are_trained(make_env):
    before = get_flat_parameters(build_trainer(make_env).policy)
    after = get_flat_parameters(trained(make_env=make_env).policy)
    assert (before != after).float().mean() > 0.9


class PushesFirst(Policy, TorchModel):
    """A documented policy wrapper: a heuristic takes the first action, the network the others."""

    def __init__(self, torch_policy):
        super().__init__(torch_policy.device)
        self.torch_policy, self.n_actions = torch_policy, 0

    def compute_action(self, observation, maze_state=None, env=None, actor_id=None, deterministic=False):
        self.n_actions += 1
        if self.n_actions == 1:
            return {"action": 1}
        return self.torch_policy.compute_action(observation, maze_state, env, actor_id, deterministic)

    def seed(self, seed):
        self.n_actions = 0
        self.torch_policy.seed(seed)

    def parameters(self):
        return self.torch_policy.parameters()

    def eval(self):
        self.torch_policy.eval()

    def train(self):
        self.torch_policy.train()

    def to(self, device):
        self.torch_policy.to(device)

    def state_dict(self):
        return self.torch_policy.state_dict()

    def load_state_dict(self, state_dict):
        self.torch_policy.load_state_dict(state_dict)


def test_a_policy_around_the_network_acts_and_is_trained(tmp_path):
    checkpoint = tmp_path / "latest.pt"
    trainer = build_trainer_of(PushesFirst(build_policy(cartpole())), checkpoint)
    before = get_flat_parameters(trainer.policy)
    trainer.train(rollouts_of(cartpole), n_epochs=2)
    assert trainer.policy.n_actions > 1
    assert (before != get_flat_parameters(trainer.policy)).float().mean() > 0.9
    resumed = build_trainer_of(PushesFirst(build_policy(cartpole())))
    resumed.load_state(checkpoint)
    for each in (trainer, resumed):
        each.train(rollouts_of(cartpole), n_epochs=1)
    assert torch.equal(get_flat_parameters(trainer.policy), get_flat_parameters(resumed.policy))


@pytest.mark.parametrize("optimizer", ["adam.Adam", "sgd.SGD"])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, optimizer):
    config = {"optimizer": {"_target_": f"maze.train.trainers.es.optimizers.{optimizer}", "step_size": 0.05}}
    uninterrupted = trained(4, **config)
    first = build_trainer(checkpoint_file=tmp_path / "latest.pt", **config)

    class StopsAfterTwo(BestModelSelection):
        def update(self, reward):
            super().update(reward)
            if self.n_updates == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(TrainingInterrupted, match=r"after epoch 2. Its state is saved in .*latest.pt"):
        first.train(rollouts_of(cartpole), n_epochs=4, model_selection=StopsAfterTwo(None, first.policy))
    resumed = build_trainer(**config)
    resumed.load_state(tmp_path / "latest.pt")
    selection = BestModelSelection(None, resumed.policy)
    resumed.train(rollouts_of(cartpole), n_epochs=4, model_selection=selection)
    assert resumed.epoch == 4
    assert selection.n_updates == 5  # before each update, and after the last one
    assert torch.equal(get_flat_parameters(resumed.policy), get_flat_parameters(uninterrupted.policy))


def test_the_best_model_has_the_weights_that_were_evaluated():
    trainer = build_trainer()
    selection = BestModelSelection(None, trainer.policy)
    start = copy.deepcopy(trainer.policy.state_dict())
    trainer.train(rollouts_of(cartpole), n_epochs=1, model_selection=selection)
    selection.reset_to_best()
    for key, network in trainer.policy.state_dict()["policies"].items():
        assert all(torch.equal(value, start["policies"][key][name]) for name, value in network.items())


def test_a_header_counts_the_updates_from_zero_and_the_last_evaluation_has_one(capsys):
    build_trainer().train(rollouts_of(cartpole), n_epochs=2)
    headers = [line for line in capsys.readouterr().out.splitlines() if line.startswith("*")]
    assert headers == [f"********** Iteration {number} **********" for number in range(3)]


def test_training_stops_early_without_improvement(capsys):
    trainer = build_trainer(counting_env, patience=2)  # its returns do not depend on the policy
    trainer.train(rollouts_of(counting_env), n_epochs=50, model_selection=BestModelSelection(None, None))
    assert trainer.epoch == 3
    assert "early stopping: 2 evaluations without improvement" in capsys.readouterr().out


class Scripted(ESDistributedRollouts):
    """Gives results that were written down beforehand, and notes how many were taken."""

    def __init__(self, returns, lengths=(10, 10)):
        self.returns, self.lengths, self.n_taken = returns, lengths, 0

    def generate_rollouts(self, policy, max_steps, noise_stddev, normalization_stats):
        for index, (plus, minus) in enumerate(self.returns):
            self.n_taken += 1
            result = ESRolloutResult(is_eval=False)
            result.noise_indices.append(index)
            result.add_episode({}, plus, self.lengths[0])
            result.add_episode({}, minus, self.lengths[1])
            yield result


@pytest.mark.parametrize(
    ("n_rollouts", "n_timesteps", "expected"),
    [(4, 0, 2), (5, 0, 3), (0, 45, 3), (4, 100, 5), (8, 20, 4)],
)
def test_update_has_the_configured_numbers_of_episodes_and_steps(n_rollouts, n_timesteps, expected):
    rollouts = Scripted([(1.0, 0.0)] * 20)
    trainer = build_trainer(n_rollouts_per_update=n_rollouts, n_timesteps_per_update=n_timesteps)
    trainer.train(rollouts, n_epochs=1)
    assert rollouts.n_taken == expected


def test_equal_returns_leave_all_but_the_penalty():
    sgd = {"_target_": "maze.train.trainers.es.optimizers.sgd.SGD", "step_size": 0.1, "momentum": 0.0}
    trainer = build_trainer(optimizer=sgd, l2_penalty=0.5)
    before = get_flat_parameters(trainer.policy)
    trainer.train(Scripted([(500.0, 500.0)] * 2), n_epochs=1)
    np.testing.assert_allclose(get_flat_parameters(trainer.policy), before * (1 - 0.1 * 0.5), rtol=1e-5)


class KeepsWeights(BestModelSelection):
    """Remembers what was judged."""

    def __init__(self, policy):
        super().__init__(None, policy)
        self.judged = []

    def update(self, reward):
        super().update(reward)
        self.judged.append((reward, get_flat_parameters(self.model)))


def test_the_policy_after_the_last_update_is_evaluated():
    trainer = build_trainer()
    selection = KeepsWeights(trainer.policy)
    trainer.train(rollouts_of(cartpole), n_epochs=2, model_selection=selection)
    assert len(selection.judged) == 3
    assert torch.equal(selection.judged[-1][1], get_flat_parameters(trainer.policy))
    trainer.train(rollouts_of(cartpole), n_epochs=1, model_selection=selection)
    assert len(selection.judged) == 4  # a known evaluation is not reported twice


def test_without_evaluations_the_training_episodes_measure_the_policy():
    trainer = build_trainer(counting_env, patience=3)
    selection = KeepsWeights(trainer.policy)
    trainer.train(rollouts_of(counting_env, n_eval_rollouts=0), n_epochs=50, model_selection=selection)
    assert [reward for reward, _ in selection.judged] == [6.0] * 4
    assert trainer.epoch == 4


def test_an_objective_needs_evaluations():
    trainer = build_trainer(constraints=["reward >= 5"])
    with pytest.raises(ConfigError, match=r"runner\.n_eval_rollouts to at least 1"):
        trainer.train(rollouts_of(cartpole, 0), n_epochs=1, model_selection=KeepsWeights(trainer.policy))


def test_frozen_layers_stay_what_they_are():
    trainer = build_trainer()
    network = trainer.policy.networks[0]
    first = next(iter(network.hidden))
    for parameter in first.parameters():
        parameter.requires_grad_(False)
    frozen = build_trainer_of(trainer.policy, l2_penalty=0.1)
    before = [parameter.clone() for parameter in first.parameters()]
    others = get_flat_parameters(frozen.policy)
    frozen.train(rollouts_of(cartpole), n_epochs=2)
    assert all(torch.equal(a, b) for a, b in zip(before, first.parameters(), strict=True))
    assert (get_flat_parameters(frozen.policy) != others).all()


def test_nothing_to_train_is_an_error():
    policy = build_policy(cartpole())
    for parameter in policy.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ConfigError, match="all parameters of the policy are frozen"):
        build_trainer_of(policy)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_return_that_is_not_finite_stops_training_before_the_step(tmp_path, value):
    trainer = build_trainer(checkpoint_file=tmp_path / "latest.pt")
    before = get_flat_parameters(trainer.policy)
    with pytest.raises(NonFiniteError, match=r"Epoch 1, update 1: the returns or"):
        trainer.train(Scripted([(1.0, 2.0), (3.0, value)]), n_epochs=1)
    (file,) = tmp_path.glob("non_finite_*.pt")
    assert torch.equal(get_flat_parameters(trainer.policy), before)
    again = build_trainer()
    again.load_training_state(load_state(file)["training_state"])
    assert torch.equal(get_flat_parameters(again.policy), before)


class Collect(LogStatsWriter):
    def __init__(self):
        self.rows = []

    def write(self, path, step, stats):
        self.rows += [(path, step, key.event.__qualname__, key.output_name, key.group) for key in stats]


def test_statistics_of_training_and_evaluation_are_logged_each_epoch():
    with StatsContext() as context:
        writer = Collect()
        context.register_writer(writer)
        trained(2)
    for step in (1, 2):
        for path in ("train", "eval"):
            assert (path, step, "BaseEnvEvents.reward", "mean", None) in writer.rows
        for event in ("policy_grad_norm", "policy_norm"):
            assert ("train", step, f"{ESEvents.__name__}.{event}", None, (0,)) in writer.rows
        for event in ("update_ratio", "real_time"):
            assert ("train", step, f"{ESEvents.__name__}.{event}", None, None) in writer.rows


def test_an_update_without_any_rollout_is_refused():
    with pytest.raises(ConfigError, match="`n_rollouts_per_update` and `n_timesteps_per_update` are both 0"):
        build_trainer(n_rollouts_per_update=0)


def test_a_table_that_is_too_small_is_refused_before_training():
    with pytest.raises(ConfigError, match=r"runner\.shared_noise_table_size"):
        ESTrainer({}, build_policy(cartpole()), SharedNoiseTable(10), None)


def run_command(tmp_path, monkeypatch, *overrides):
    monkeypatch.chdir(tmp_path)
    with initialize_config_module("maze.conf", version_base="1.3"):
        cfg = compose(
            "conf_train",
            overrides=[
                *("algorithm=es", "env.name=CartPole-v1", "algorithm.n_epochs=2", "seeding.env_base_seed=1"),
                *("seeding.agent_base_seed=1", "runner.n_eval_rollouts=2", *overrides),
            ],
        )
    runner = Factory(Runner).instantiate(cfg.runner)
    with StatsContext():
        runner.setup(cfg)
        runner.run()
    return runner


def test_the_runner_leaves_the_documented_files_behind(tmp_path, monkeypatch):
    runner = run_command(tmp_path, monkeypatch, "model=flatten_concat")
    assert isinstance(runner, ESDevRunner)
    assert {"state_dict.pt", "latest.pt", "spaces_config.pkl"} <= {path.name for path in tmp_path.iterdir()}
    (tmp_path / "again").mkdir()
    again = run_command(tmp_path / "again", monkeypatch, "model=flatten_concat")
    assert torch.equal(get_flat_parameters(runner.trainer.policy), get_flat_parameters(again.trainer.policy))


class OwnTrainer(ESTrainer):
    """A trainer of one's own."""


def test_the_runner_builds_the_trainer_that_is_named(tmp_path, monkeypatch):
    few = ("model=flatten_concat", "runner.shared_noise_table_size=100000", "algorithm.n_rollouts_per_update=4")
    runner = run_command(tmp_path, monkeypatch, *few, f"+runner.trainer_class={__name__}.OwnTrainer")
    assert type(runner.trainer) is OwnTrainer
    assert runner.trainer.shared_noise is runner.shared_noise


def test_two_calls_are_one_long_call(tmp_path, monkeypatch):
    few = ("model=flatten_concat", "runner.shared_noise_table_size=100000", "algorithm.n_rollouts_per_update=4")
    whole, parts = (run_command(tmp_path, monkeypatch, *few, f"algorithm.n_epochs={n}") for n in (2, 1))
    with StatsContext():
        parts.run(n_epochs=1)
    assert torch.equal(get_flat_parameters(whole.trainer.policy), get_flat_parameters(parts.trainer.policy))


def test_training_outside_of_the_main_thread_sets_no_signal_handlers():
    """Outside of the main thread there are no signal handlers; training works all the same."""
    trainer = build_trainer()
    thread = threading.Thread(target=lambda: trainer.train(rollouts_of(cartpole), n_epochs=1))
    thread.start()
    thread.join(60)
    assert trainer.epoch == 1


def test_configured_policy_wrappers_are_trained(tmp_path, monkeypatch):
    wrapper = f"algorithm.policy_wrapper={{_target_: {__name__}.{PushesFirst.__name__}}}"
    small = ("algorithm.n_rollouts_per_update=4", "algorithm.max_steps=20", "runner.shared_noise_table_size=100000")
    runner = run_command(tmp_path, monkeypatch, *small, wrapper)
    assert isinstance(runner.trainer.policy, PushesFirst)
    assert runner.trainer.policy.n_actions > 1
    with pytest.raises(ConfigError, match=r"algorithm\.policy_wrapper: RandomFirst has no parameters to train"):
        run_command(tmp_path, monkeypatch, *small, wrapper.replace("PushesFirst", "RandomFirst"))


class RandomFirst(Policy):
    """Not a policy wrapper: it has no parameters."""

    def __init__(self, torch_policy):
        self.torch_policy = torch_policy

    def compute_action(self, observation, maze_state=None, env=None, actor_id=None, deterministic=False):
        return self.torch_policy.compute_action(observation, maze_state, env, actor_id, deterministic)
