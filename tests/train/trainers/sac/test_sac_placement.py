"""SAC with all execution backends, and with own buffers and runners."""

import functools
import os
import random
import signal
import threading
import time

import pytest
import torch

from maze.api.run_context import RunContext
from maze.core.agent.random_policy import RandomPolicy
from maze.core.errors import ConfigError, MazeError
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.train.parallelization.distributed_actors.dummy_distributed_workers_with_buffer import (
    DummyDistributedWorkersWithBuffer,
)
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from maze.train.trainers.common.replay_buffer.replay_buffer import BaseReplayBuffer
from maze.train.trainers.common.replay_buffer.uniform_replay_buffer import UniformReplayBuffer
from maze.train.trainers.common.replay_trainer import fill_by_policy
from maze.train.trainers.sac.sac_runners import SACRunner
from maze.train.trainers.sac.sac_trainer import SAC
from tests.train.parallelization.toy_envs import counting_env, random_walk_env, two_step_env
from tests.train.trainers.sac.sac_models import build_model

SMALL = {
    "n_epochs": 2, "epoch_length": 3, "num_actors": 2, "rollouts_per_iteration": 2, "n_rollout_steps": 3,
    "initial_buffer_size": 30, "replay_buffer_size": 300, "batch_size": 8, "rollout_evaluator": None,
}  # fmt: skip


def training(runner, make_env=random_walk_env, **algorithm):
    overrides = {f"algorithm.{key}": value for key, value in {**SMALL, **algorithm}.items()}
    return RunContext(
        env=make_env,
        algorithm="sac",
        critic="flatten_concat_state_action",
        runner=runner,
        overrides={**overrides, "seeding.env_base_seed": 1, "seeding.agent_base_seed": 1},
        silent=True,
    )


@pytest.fixture(autouse=True)
def _in_run_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def groups(run):
    return [group.env for group in run.runner.trainer.workers._groups]


def learned(runner, **algorithm):
    with training(runner, **algorithm) as run:
        run.train()
        trainer = run.runner.trainer
        is_in_processes = {type(env) for env in groups(run)} == {SubprocVectorEnv}
        assert is_in_processes == (runner == "local")
        collected = trainer.workers.replay_buffer.columns.state_dict()["arrays"]
        return collected, [parameter.detach().clone() for parameter in trainer.model.parameters()]


def are_equal(one, other):
    return all(torch.equal(one[0][key], other[0][key]) for key in one[0]) and all(map(torch.equal, one[1], other[1]))


@pytest.mark.parametrize("ahead", [False, True])
def test_both_placements_collect_and_learn_the_same(ahead):
    # two groups of environments that take turns
    one, other = (learned(runner, collect_ahead=ahead, num_actors=4) for runner in ("dev", "local"))
    assert are_equal(one, other)


@pytest.mark.long
def test_only_processes_collect_ahead_by_default():
    waiting, ahead = (learned("dev", collect_ahead=value) for value in (False, True))
    assert not are_equal(waiting, ahead)
    assert are_equal(learned("dev"), waiting)
    assert are_equal(learned("local"), ahead)


@pytest.mark.parametrize(("item_length", "n_steps"), [(1, 33), (4, 36)])
def test_all_environments_fill_the_buffer_each_with_steps_of_its_own(item_length, n_steps):
    env, replay_buffer = SequentialVectorEnv([random_walk_env] * 3), UniformReplayBuffer(200, seed=0)
    policy = RandomPolicy(env.action_spaces_dict)
    assert fill_by_policy(replay_buffer, policy, -(-31 // item_length), 5, item_length, env) == n_steps
    assert len(replay_buffer) == n_steps // item_length
    rewards = replay_buffer.columns.state_dict()["arrays"]["rewards"][:n_steps].reshape(3, -1)
    assert len({tuple(of_env.tolist()) for of_env in rewards}) == 3


def test_collect_ahead_uses_the_policy_of_the_previous_update():
    with training("dev", collect_ahead=True) as run:
        run.train(n_epochs=1)  # ends with the rollouts of the next update, which came before the last one
        trainer, before_updates, acted = run.runner.trainer, [], []
        collected, update = trainer.workers._collected, trainer._update

        def noted_collected():
            time.sleep(0.05)  # the learner is done long before
            acted.append(weights_of(trainer.workers.worker_policy))
            return collected()

        def noted_update():
            before_updates.append(weights_of(trainer.policy))
            update()

        trainer.workers._collected, trainer._update = noted_collected, noted_update
        run.train(n_epochs=1)
    assert len(acted) == len(before_updates) == SMALL["epoch_length"]
    assert all(map(torch.equal, acted, before_updates))
    assert not torch.equal(acted[0], acted[1])


def weights_of(policy):
    return torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])


def test_learner_continues_while_rollouts_are_collected():
    with training("dev", collect_ahead=True) as run:
        run.train(n_epochs=1)
        trainer, has_learned = run.runner.trainer, threading.Event()
        collected, learn = trainer.workers._collected, trainer._learn_from

        def waiting_collected():
            assert has_learned.wait(10), "the learner has waited"
            has_learned.clear()
            return collected()

        def noted_learn(batch):
            learn(batch)
            has_learned.set()

        trainer.workers._collected, trainer._learn_from = waiting_collected, noted_learn
        run.train(n_epochs=1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("runner", "fault", "message"),
    [
        ("dev", "raise", "nvironment 0.*the simulator lost its marbles"),
        ("local", "raise", r"environment worker \d \(environment \d, .*the simulator lost its marbles"),
        ("local", "kill", r"environment worker \d \(environment \d, pid \d+\) was killed by signal 9"),
    ],
)
def test_failures_while_learning_are_named(runner, fault, message):
    make_env = functools.partial(counting_env, ((20, "terminated"),), (fault, 7))
    values = {"initial_buffer_size": 1, "n_rollout_steps": 2, "collect_ahead": True}
    with training(runner, make_env, **values) as run, pytest.raises(MazeError, match=message):
        run.train()


@pytest.mark.long
def test_a_worker_that_is_killed_is_named():
    with training("local") as run:
        run.train(n_epochs=1)
        os.kill(groups(run)[0]._pool.workers[0].process.pid, signal.SIGKILL)
        with pytest.raises(MazeError, match=r"environment worker 0 \(environment 0, pid \d+\) was killed by signal 9"):
            run.train(n_epochs=1)


class ListBuffer(BaseReplayBuffer):
    """No more than the documented methods."""

    def __init__(self):
        self.items, self.random = [], random.Random(0)

    def __len__(self):
        return len(self.items)

    def add_rollout(self, rollout):
        for record in rollout:
            self.add_transition(record)

    def add_transition(self, transition):
        assert isinstance(transition, StructuredSpacesRecord)
        self.items.append(transition)

    def sample_batch(self, n_samples, learner_device):
        return [self.random.choice(self.items) for _ in range(n_samples)]


def trainer_with(buffer, make_env=random_walk_env):
    env = make_env()
    model = build_model(env)
    workers = DummyDistributedWorkersWithBuffer(
        env_factory=make_env, worker_policy=model.policy, n_rollout_steps=2, n_workers=1, batch_size=4,
        rollouts_per_iteration=1, split_rollouts_into_transitions=True, env_instance_seeds=[0], replay_buffer=buffer,
    )  # fmt: skip
    values = {"n_rollout_steps": 2, "batch_size": 4, "epoch_length": 3, "patience": 0, "rollout_evaluator": None}
    return SAC(values, model, workers, None, None, seed=0)


def test_a_buffer_with_the_documented_methods_is_enough():
    buffer = ListBuffer()
    trainer = trainer_with(buffer)
    sampling = {"_target_": "maze.core.agent.random_policy.RandomPolicy"}
    SACRunner.init_replay_buffer(buffer, sampling, 10, 0, True, 2, random_walk_env)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train(n_epochs=2)
    assert len(buffer) == 10 + 2 * 3 * 2
    step = buffer.items[0].substep_records[0]
    assert isinstance(step.reward, float)
    assert step.observation.keys() == step.next_observation.keys()
    after = list(trainer.model.parameters())
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(torch.isfinite(parameter).all() for parameter in after)
    assert trainer.training_state()["replay_buffer"] == {"content": None}
    batch = buffer.sample_transitions(5, "cpu")
    assert batch.rewards.shape == (5, 1)
    assert batch.terminated.dtype == torch.bool
    assert torch.isfinite(batch.rewards).all()


def test_a_buffer_of_single_steps_is_refused_where_steps_have_several_actors():
    with pytest.raises(ConfigError, match=r"a ListBuffer keeps single steps.*Derive it from UniformReplayBuffer"):
        trainer_with(ListBuffer(), two_step_env)
