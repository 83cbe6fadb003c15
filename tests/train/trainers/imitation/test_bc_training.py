"""Behavioural cloning from data set to trained policy."""

import math
import os
import signal
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hydra import compose, initialize_config_module
from torch.utils._python_dispatch import TorchDispatchMode

from maze.core.agent.random_policy import RandomPolicy
from maze.core.env.structured_env import ActorID
from maze.core.errors import CheckpointError, ConfigError, NonFiniteError
from maze.core.log_stats.log_stats import StatsContext
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.trajectory_recording.datasets.in_memory_dataset import InMemoryDataset
from maze.core.utils.checkpoint import load_state
from maze.core.utils.factory import Factory
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.maze_cli import main
from maze.runner import Runner
from maze.train.parallelization.placement import Processes
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from maze.train.trainers.common.evaluators.evaluator import Evaluator
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
from maze.train.trainers.imitation.bc_data import StepBatches, check_fits
from maze.train.trainers.imitation.bc_loss import BCLoss
from maze.train.trainers.imitation.bc_runners import BCLocalRunner
from maze.train.trainers.imitation.bc_trainer import BCTrainer
from maze.train.trainers.imitation.bc_validation_evaluator import BCValidationEvaluator
from maze.train.utils.run_process import TrainingInterrupted
from tests.train.parallelization.toy_envs import coming_and_going_env, counting_env, hierarchical_env, two_step_env
from tests.train.trainers.es.populations import build_policy

ENVS = [counting_env, two_step_env, hierarchical_env, coming_and_going_env]


def recorded(make_env, n_episodes=3):
    """Episodes of a random policy."""
    env = make_env()
    env.seed(1)
    policy = RandomPolicy(env.action_spaces_dict)
    policy.seed(1)
    generator = RolloutGenerator(env, terminate_on_done=True)
    return InMemoryDataset([generator.rollout(policy, None) for _ in range(n_episodes)])


def build_trainer(make_env=counting_env, dataset=None, checkpoint_file=None, selection=None, lr=0.01, batch_size=4):
    env = make_env()
    policy = build_policy(env)
    return BCTrainer(
        {"device": "cpu", "n_epochs": 3},
        StepBatches(dataset or recorded(make_env), batch_size, shuffle=True, seed=5),
        policy,
        torch.optim.SGD(policy.parameters(), lr=lr, momentum=0.9),
        BCLoss(env.action_spaces_dict, entropy_coef=0.0),
        model_selection=selection,
        checkpoint_file=checkpoint_file,
    )


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.policy.parameters()])


class LossRecorder(Evaluator):
    """Writes down the loss over all data."""

    def __init__(self, trainer, dataset):
        self.validation = BCValidationEvaluator(trainer.loss, self, StepBatches(dataset, 3))
        self.losses = []

    def update(self, reward):
        self.losses.append(-reward)

    def evaluate(self, policy):
        self.validation.evaluate(policy)


@pytest.mark.parametrize("make_env", ENVS)
def test_cloning_reduces_the_distance_to_the_demonstrations(make_env):
    dataset = recorded(make_env)
    trainer = build_trainer(make_env, dataset)
    recorder = LossRecorder(trainer, dataset)
    recorder.evaluate(trainer.policy)
    trainer.train(recorder, n_epochs=20)
    assert recorder.losses[-1] < recorder.losses[0]


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of several devices, as CUDA does."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        devices = {one.device for one in args if isinstance(one, torch.Tensor)}
        assert len(devices) < 2, f"{operation} of tensors on {devices}"
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("make_env", [counting_env, coming_and_going_env])
def test_minibatches_are_selected_where_the_data_are(make_env):
    with OneDevice():
        batches = StepBatches(recorded(make_env), 4, shuffle=True, device="meta", seed=1)
        for observations, actions, _ in batches:
            assert {tensor.device.type for part in (*observations, *actions) for tensor in part.values()} == {"meta"}


@pytest.mark.parametrize("make_env", ENVS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_pass_has_every_substep_once(make_env, shuffle):
    dataset = recorded(make_env)
    expected = Counter(
        (actor, observation[next(iter(observation))].tobytes())
        for index in range(len(dataset))
        for observation, _, actor in zip(*dataset[index], strict=True)
    )
    found = Counter()
    batches = StepBatches(dataset, 4, shuffle=shuffle, seed=1)
    assert len(batches) == math.ceil(len(dataset) / 4) == len(list(batches))
    for observations, actions, actors in batches:
        for observation, action, actor in zip(observations, actions, actors, strict=True):
            assert len({len(array) for array in (*observation.values(), *action.values())}) == 1
            found.update((actor, row.numpy().tobytes()) for row in observation[next(iter(observation))])
    assert found == expected


def test_validation_weighs_minibatches_by_their_size():
    dataset = recorded(counting_env)
    trainer = build_trainer(dataset=dataset)
    whole, parts = [LossRecorder(trainer, dataset) for _ in range(2)]
    whole.validation.data_loader = StepBatches(dataset, len(dataset))
    parts.validation.data_loader = StepBatches(dataset, 4)  # nine steps: 4, 4 and 1
    for recorder in (whole, parts):
        recorder.evaluate(trainer.policy)
    assert whole.losses == [pytest.approx(parts.losses[0], rel=1e-5)]


def test_two_runs_with_the_same_seeds_are_equal_bit_for_bit():
    trainers = [build_trainer() for _ in range(2)]
    for trainer in trainers:
        trainer.train(None)
    assert torch.equal(*map(weights, trainers))


@pytest.mark.parametrize("stop_after", [1, 3, 5])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, stop_after):
    uninterrupted = build_trainer()
    uninterrupted.train(None)
    first = build_trainer(checkpoint_file=tmp_path / "latest.pt")
    learn = first._learn_from

    def learn_and_interrupt(*batch):
        learn(*batch)
        if first.total_iterations + 1 == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    first._learn_from = learn_and_interrupt
    with pytest.raises(TrainingInterrupted, match=r"Its state is saved in .*latest\.pt"):
        first.train(None)
    assert first.total_iterations == stop_after
    resumed = build_trainer()
    resumed.load_state(tmp_path / "latest.pt")
    resumed.train(None)
    assert (resumed.epoch, resumed.total_iterations) == (3, 9)
    assert torch.equal(weights(resumed), weights(uninterrupted))


def test_evaluations_come_every_k_minibatches_and_after_each_epoch(capsys):
    evaluated_after = []

    class Noting(Evaluator):
        def evaluate(self, policy):
            evaluated_after.append(trainer.total_iterations)

    trainer = build_trainer()  # three minibatches per epoch
    trainer.train(Noting(), n_epochs=2, eval_every_k_iterations=2)
    assert evaluated_after == [2, 3, 4, 6]
    headers = [line for line in capsys.readouterr().out.splitlines() if line.startswith("*")]
    expected = ["Epoch 1: Iteration 2", "Epoch 1: Iteration 3", "Epoch 2: Iteration 4", "Epoch 2: Iteration 6"]
    assert headers == [f"********** {text} **********" for text in expected]


def test_a_number_that_is_not_finite_stops_training_before_the_step():
    dataset = recorded(counting_env)
    for record in dataset.step_records:
        record.substep_records[0].observation["count"] = np.array([np.nan, 0], np.float32)
    trainer = build_trainer(dataset=dataset)
    before = weights(trainer)
    with pytest.raises(NonFiniteError, match="Epoch 1, update 1: the loss is nan"):
        trainer.train(None)
    assert torch.equal(weights(trainer), before)


@pytest.mark.parametrize(
    ("make_env", "message"),
    [
        (partial(GymMazeEnv, "CartPole-v1"), r"observation of sub-step 0, step 0: expected finite values of Dict"),
        (two_step_env, r"sub-step 0, step 0: expected finite values of None"),
    ],
)
def test_a_dataset_of_another_environment_is_refused(make_env, message):
    env = make_env()
    with pytest.raises(ConfigError, match=message):
        check_fits(recorded(counting_env), env.observation_spaces_dict, env.action_spaces_dict)


def test_other_shapes_and_empty_data_are_refused():
    env = counting_env()
    dataset = recorded(counting_env)
    dataset.step_records[2].substep_records[0].action = {"move": np.zeros(3)}
    with pytest.raises(ConfigError, match=r"action of sub-step 0, step 2: expected finite values of"):
        check_fits(dataset, env.observation_spaces_dict, env.action_spaces_dict)
    with pytest.raises(ConfigError, match=r"runner\.dataset: there is no step in the data"):
        check_fits(InMemoryDataset(), env.observation_spaces_dict, env.action_spaces_dict)


@pytest.mark.parametrize("move", [-1, 5])
def test_choices_that_the_environment_does_not_have_are_refused(move):
    env = counting_env()
    dataset = recorded(counting_env)
    dataset.step_records[1].substep_records[0].action = {"move": np.int64(move)}
    with pytest.raises(
        ConfigError, match=rf"step 1: expected finite values of .*Discrete\(5\)\), found .*{move}.*Was it"
    ):
        check_fits(dataset, env.observation_spaces_dict, env.action_spaces_dict)


class OneActor:
    """A data set of one step."""

    def __init__(self, observation, action):
        self.item = [{"o": observation}], [{"a": action}], [ActorID(0, 0)]

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.item


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        ([0.0, np.nan], [0.0], r"observation of sub-step 0, step 0: .*found .*nan"),
        ([-np.inf, 0.0], [0.0], r"observation of sub-step 0, step 0: .*found .*-inf"),
        ([9.0, 0.0], [np.nan], r"action of sub-step 0, step 0: .*found .*nan"),
    ],
)
def test_numbers_that_are_not_finite_are_refused(observation, action, message):
    dataset = OneActor(np.array(observation, np.float32), np.array(action, np.float32))
    with pytest.raises(ConfigError, match=message):
        check_fits(dataset, {0: spaces.Dict(o=spaces.Box(-1, 1, (2,)))}, {0: spaces.Dict(a=spaces.Box(-1, 1, (1,)))})


def test_continuous_actions_are_learned_as_the_environment_carried_them_out():
    dataset = OneActor(np.array([9.0, 0.0], np.float32), np.array([5.0], np.float32))
    action_spaces = {0: spaces.Dict(a=spaces.Box(-1, 1, (1,)))}
    check_fits(dataset, {0: spaces.Dict(o=spaces.Box(-1, 1, (2,)))}, action_spaces)  # observations may be anything
    ((observations, actions, _),) = StepBatches(dataset, 1, action_spaces_dict=action_spaces)
    assert observations[0]["o"].tolist() == [[9.0, 0.0]]
    assert actions[0]["a"].tolist() == [[1.0]]


def test_a_validation_loss_that_is_not_finite_ends_the_training():
    dataset = recorded(counting_env)
    trainer = build_trainer(dataset=dataset)
    evaluator = BCValidationEvaluator(trainer.loss, BestModelSelection(None, None), StepBatches(dataset, 4))
    evaluator.data_loader._columns[ActorID(0, 0)].observations["count"][:] = math.nan
    with pytest.raises(NonFiniteError, match="the loss on the validation data is nan"):
        trainer.train(evaluator)
    assert trainer.epoch == 1


def test_the_best_model_does_not_depend_on_the_entropy_bonus():
    dataset = recorded(counting_env)
    trainer = build_trainer(dataset=dataset)
    found = []
    for entropy_coef in (0.0, 10.0):
        trainer.loss.entropy_coef = entropy_coef
        recorder = LossRecorder(trainer, dataset)
        recorder.evaluate(trainer.policy)
        found += recorder.losses
        assert trainer.loss.entropy_coef == entropy_coef, "training keeps it"
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("make_env", ENVS)
def test_where_an_actor_acts_in_every_step_is_looked_up_once(make_env):
    dataset = recorded(make_env)
    for actor, columns in StepBatches(dataset, 4)._columns.items():
        n_occurrences = [sum(other == actor for other in dataset[step][2]) for step in range(len(dataset))]
        assert columns.is_in_every_step == all(n == 1 for n in n_occurrences)


def stopped_within_an_epoch(directory):
    trainer = build_trainer(checkpoint_file=directory / "latest.pt")
    learn = trainer._learn_from

    def learn_and_interrupt(*batch):
        learn(*batch)
        if trainer.total_iterations == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer._learn_from = learn_and_interrupt
    with pytest.raises(TrainingInterrupted):
        trainer.train(None)
    return load_state(directory / "latest.pt")


def test_a_resumed_run_learns_with_the_configured_learning_rate(tmp_path):
    state = stopped_within_an_epoch(tmp_path)
    resumed = build_trainer(lr=0.0)
    resumed.resume(state, tmp_path)
    before = weights(resumed)
    resumed.train(None)
    assert torch.equal(weights(resumed), before)
    assert (resumed.optimizer.param_groups[0]["momentum"], resumed.epoch) == (0.9, 3)


def test_a_run_is_not_resumed_with_another_optimizer(tmp_path):
    state = stopped_within_an_epoch(tmp_path)
    resumed = build_trainer()
    resumed.optimizer = torch.optim.Adam(resumed.policy.parameters(), lr=0.01)
    before = weights(resumed)
    with pytest.raises(ConfigError, match=r"algorithm\.optimizer: .* has torch\.optim\.sgd\.SGD, found .*Adam"):
        resumed.resume(state, tmp_path)
    assert torch.equal(weights(resumed), before)


def test_an_epoch_that_was_interrupted_is_not_resumed_with_other_minibatches(tmp_path):
    state = stopped_within_an_epoch(tmp_path)
    with pytest.raises(ConfigError, match=r"batch_size.* has .*'n_minibatches': 3, .* found .*'n_minibatches': 1, "):
        build_trainer(batch_size=9).resume(state, tmp_path)
    complete = build_trainer()
    complete.train(None, n_epochs=1)
    resumed = build_trainer(batch_size=9)
    resumed.resume(complete.training_state(), tmp_path)
    resumed.train(None)
    assert (resumed.epoch, resumed.total_iterations) == (3, 5)


def test_progress_before_a_non_finite_value_is_kept(tmp_path):
    dataset = recorded(counting_env)
    trainer = build_trainer(dataset=dataset, checkpoint_file=tmp_path / "latest.pt")
    trainer.model_selection = BestModelSelection(tmp_path / "state_dict.pt", trainer.policy)
    evaluator = BCValidationEvaluator(trainer.loss, trainer.model_selection, StepBatches(dataset, 4))
    trainer.train(evaluator, n_epochs=1)
    kept = weights(trainer)
    trainer.data_loader._columns[ActorID(0, 0)].observations["count"][:] = math.nan
    with pytest.raises(NonFiniteError, match="Epoch 2, update 1: the loss is nan"):
        trainer.train(evaluator, n_epochs=1)
    again = build_trainer(dataset=dataset)
    assert len(list(tmp_path.glob("non_finite_*.pt"))) == 1
    for file in ("latest.pt", "state_dict.pt"):
        again.load_state(tmp_path / file)
        assert torch.equal(weights(again), kept)


def configured(*overrides):
    with initialize_config_module("maze.conf", version_base="1.3"):
        cfg = compose(
            "conf_train",
            overrides=[
                *("algorithm=bc", "env.name=CartPole-v1", "model=flatten_concat", "algorithm.device=cpu"),
                *("algorithm.n_epochs=2", "algorithm.n_eval_episodes=2", "seeding.env_base_seed=1"),
                *("seeding.agent_base_seed=1", "runner.eval_concurrency=1", *overrides),
            ],
        )
    return Factory(Runner).instantiate(cfg.runner), cfg


def record_files(directory, n_episodes=3, env_id="CartPole-v1"):
    from maze.core.trajectory_recording.writers.trajectory_writer_file import TrajectoryWriterFile

    directory.mkdir()
    env = GymMazeEnv(env_id)
    env.seed(1)
    policy = RandomPolicy(env.action_spaces_dict)
    policy.seed(1)
    generator = RolloutGenerator(env, terminate_on_done=True)
    writer = TrajectoryWriterFile(log_dir=str(directory))
    for _ in range(n_episodes):
        writer.write(generator.rollout(policy, None))
    return directory


@pytest.mark.parametrize("key", ["dir_or_file", "input_data"])
def test_the_runner_trains_from_either_documented_key(tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    runner, cfg = configured(f"runner.dataset.{key}={record_files(tmp_path / 'data')}")
    with StatsContext():
        runner.setup(cfg)
        assert len(runner.evaluators) == 2
        runner.run()
    assert {"state_dict.pt", "latest.pt", "spaces_config.pkl"} <= {path.name for path in tmp_path.iterdir()}
    assert runner.trainer.model_selection.n_updates == 2


def test_a_run_without_evaluations_writes_its_final_weights(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    data = record_files(tmp_path / "data")
    runner, cfg = configured(
        f"runner.dataset.dir_or_file={data}", "algorithm.validation_percentage=0", "algorithm.n_eval_episodes=0"
    )
    with StatsContext():
        runner.setup(cfg)
        runner.run()
    kept = weights(runner.trainer)
    runner.trainer.load_state("state_dict.pt")
    assert torch.equal(weights(runner.trainer), kept)
    assert "state_dict.pt" in caplog.text


@pytest.mark.long
def test_the_runner_trains_on_with_environments_in_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner, cfg = configured("runner=local", f"runner.dataset.dir_or_file={record_files(tmp_path / 'data')}")
    with StatsContext():
        runner.setup(cfg)
        try:
            for n_epochs in (1, 2):
                runner.run(n_epochs=1)
                assert runner.trainer.epoch == n_epochs
        finally:
            runner.close()


def test_evaluations_have_the_configured_placement_unless_a_subclass_makes_its_environments():
    class OwnRunner(BCLocalRunner):
        @classmethod
        def create_distributed_eval_env(cls, env_factory, eval_concurrency, logging_prefix):
            return SequentialVectorEnv([env_factory] * eval_concurrency, logging_prefix)

    for runner_class, expected in ((BCLocalRunner, SubprocVectorEnv), (OwnRunner, SequentialVectorEnv)):
        runner = runner_class()
        runner.placement = Processes(n_workers=1)
        env = runner.create_distributed_env(counting_env, 2, "eval")
        try:
            assert type(env) is expected
            assert len(getattr(env, "groups", [0])) == 1  # one worker process, although there are two cores
        finally:
            env.close()


def test_relative_paths_of_a_list_are_searched_where_the_command_was_started(tmp_path, monkeypatch):
    record_files(tmp_path / "first", n_episodes=1)
    record_files(tmp_path / "second", n_episodes=2)
    monkeypatch.chdir(tmp_path)
    command = ["-cn", "conf_train", "algorithm=bc", "env.name=CartPole-v1", "model=flatten_concat"]
    command += ["algorithm.device=cpu", "algorithm.n_epochs=1", "algorithm.n_eval_episodes=0", "hydra.run.dir=run"]
    assert main([*command, "runner.dataset.dir_or_file=[first,second]"]) == 0
    assert (tmp_path / "run" / "state_dict.pt").exists()


def test_two_runs_with_the_same_seeds_write_the_same_weights(tmp_path, monkeypatch):
    data = record_files(tmp_path / "data")
    found = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        runner, cfg = configured(f"runner.dataset.dir_or_file={data}")
        with StatsContext():
            runner.setup(cfg)
            runner.run()
        found.append(weights(runner.trainer))
    assert torch.equal(*found)


@pytest.mark.parametrize(("split", "is_whole"), [("auto", False), ("steps", False), ("episodes", True)])
def test_validation_data_are_single_steps_or_whole_episodes_as_configured(tmp_path, monkeypatch, split, is_whole):
    monkeypatch.chdir(tmp_path)
    data = record_files(tmp_path / "data")
    runner, cfg = configured(f"runner.dataset.dir_or_file={data}", f"algorithm.validation_split={split}")
    parts = []
    monkeypatch.setattr(
        "maze.train.trainers.imitation.bc_trainer.StepBatches",
        lambda part, *args, **kwargs: parts.append(part) or StepBatches(part, *args, **kwargs),
    )
    with StatsContext():
        runner.setup(cfg)
        runner.close()
    episodes = [
        {
            number
            for number, steps in enumerate(part.dataset.trajectory_references)
            for index in part.indices
            if index in steps
        }
        for part in parts
    ]
    assert sum(len(part.indices) for part in parts) == len(parts[0].dataset)
    assert episodes[0].isdisjoint(episodes[1]) == is_whole


def test_the_runner_refuses_data_of_another_environment_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = record_files(tmp_path / "data", n_episodes=1, env_id="MountainCar-v0")
    runner, cfg = configured(f"runner.dataset.dir_or_file={data}")
    with (
        StatsContext(),
        pytest.raises(ConfigError, match=r"runner\.dataset: observation of sub-step 0, step 0: expected finite values"),
    ):
        runner.setup(cfg)
    assert not (tmp_path / "state_dict.pt").exists()


def test_missing_data_raises_an_error_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner, cfg = configured()
    with (
        StatsContext(),
        pytest.raises(CheckpointError, match=r"trajectory_data does not exist.*record_tr"),
    ):
        runner.setup(cfg)


def test_a_policy_with_other_weights_is_left_unchanged(tmp_path):
    trainer = build_trainer()
    before = weights(trainer)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        trainer.load_state_dict(build_policy(two_step_env()).state_dict())
    assert torch.equal(weights(trainer), before)


def test_the_best_model_is_the_one_with_the_smallest_validation_loss():
    dataset = recorded(counting_env)
    trainer = build_trainer(dataset=dataset)
    selection = BestModelSelection(None, trainer.policy)
    evaluator = BCValidationEvaluator(trainer.loss, selection, StepBatches(dataset, 4))
    evaluator.evaluate(trainer.policy)
    before, first = weights(trainer), selection.best_reward
    trainer.train(evaluator, n_epochs=3)
    assert selection.best_reward > first
    selection.reset_to_best()
    assert not torch.equal(weights(trainer), before)
    assert ActorID(0, 0) in {actor for *_, actors in StepBatches(dataset, 4) for actor in actors}
