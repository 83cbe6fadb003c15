"""SAC where its environments are placed elsewhere, and with buffers and runners of somebody's own."""

import os
import random
import signal

import pytest
import torch

from maze.api.run_context import RunContext
from maze.core.errors import ConfigError, MazeError
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.train.parallelization.distributed_actors.dummy_distributed_workers_with_buffer import (
    DummyDistributedWorkersWithBuffer,
)
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from maze.train.trainers.common.replay_buffer.replay_buffer import BaseReplayBuffer
from maze.train.trainers.sac.sac_runners import SACRunner
from maze.train.trainers.sac.sac_trainer import SAC
from tests.train.parallelization.toy_envs import random_walk_env, two_step_env
from tests.train.trainers.sac.sac_models import build_model

SMALL = {
    "n_epochs": 2, "epoch_length": 3, "num_actors": 2, "rollouts_per_iteration": 2, "n_rollout_steps": 3,
    "initial_buffer_size": 30, "replay_buffer_size": 300, "batch_size": 8, "rollout_evaluator": None,
}  # fmt: skip


def training(runner):
    overrides = {f"algorithm.{key}": value for key, value in SMALL.items()}
    return RunContext(
        env=random_walk_env,
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


def test_both_placements_collect_and_learn_the_same():
    found = []
    for runner, env_class in (("dev", SequentialVectorEnv), ("local", SubprocVectorEnv)):
        with training(runner) as run:
            run.train()
            assert {type(env) for env in groups(run)} == {env_class}
            columns = run.runner.trainer.workers.replay_buffer.columns
            weights = [parameter.detach().clone() for parameter in run.runner.trainer.model.parameters()]
            found.append((columns.state_dict()["arrays"], weights))
    (one, first), (other, second) = found
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


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


def test_something_that_is_no_buffer_is_refused():
    with pytest.raises(ConfigError, match="replay_buffer: expected a BaseReplayBuffer, found list"):
        trainer_with([])
