"""Trainings with SAC: action spaces, structured environments, reproducibility, resuming, failures."""

import os
import signal
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import ActorID
from maze.core.errors import CheckpointError, ConfigError
from maze.core.log_stats.log_stats import LogStatsWriter, StatsContext, register_log_stats_writer
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.trajectory_recording.datasets.in_memory_dataset import InMemoryDataset
from maze.core.utils.checkpoint import load_state
from maze.core.utils.factory import Factory
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.common.evaluators.rollout_evaluator import RolloutEvaluator
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
from maze.train.trainers.common.replay_buffer.uniform_replay_buffer import UniformReplayBuffer
from maze.train.trainers.common.replay_trainer import add_demonstrations
from maze.train.trainers.sac.sac_runners import SACDevRunner, SACRunner
from maze.train.trainers.sac.sac_trainer import SAC
from maze.train.utils.run_process import TrainingInterrupted
from tests.train.parallelization.toy_envs import (
    Observe,
    PassOn,
    RandomWalkCoreEnv,
    ToyCoreEnv,
    counting_env,
    random_walk_env,
    two_step_env,
)
from tests.train.trainers.sac.sac_models import build_model, build_trainer

HEADS = {
    "discrete": {"a": spaces.Discrete(3)},
    "multi-discrete": {"a": spaces.MultiDiscrete([2, 3])},
    "multi-binary": {"a": spaces.MultiBinary(2)},
    "box": {"a": spaces.Box(-1, 1, (2,), np.float32)},
    "several discrete heads": {"a": spaces.Discrete(3), "b": spaces.Discrete(2)},
    "a dictionary of everything": {
        "a": spaces.Discrete(3), "b": spaces.Box(-2, 2, (2,), np.float32), "c": spaces.MultiDiscrete([2, 2]),
    },
}  # fmt: skip


class AnyActionCoreEnv(RandomWalkCoreEnv):
    def step(self, maze_action):
        return super().step({"push": 0.0})


def env_with_heads(heads):
    observation = spaces.Dict({"position": spaces.Box(-np.inf, np.inf, (3,), np.float32)})
    return MazeEnv(AnyActionCoreEnv(), {0: PassOn(spaces.Dict(heads))}, {0: Observe(observation)})


def weights(trainer):
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def are_equal(first, second):
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("name", HEADS)
def test_all_action_spaces_train(name):
    trainer = build_trainer(partial(env_with_heads, HEADS[name]))
    before = weights(trainer)
    trainer.train()
    assert not any(torch.equal(one, other) for one, other in zip(before, weights(trainer), strict=True))


@pytest.mark.parametrize("critic", ["", "Shared"])
@pytest.mark.parametrize("breaks_at", [None, 2])
def test_structured_environments_train_with_both_kinds_of_critics(critic, breaks_at):
    trainer = build_trainer(partial(two_step_env, breaks_at=breaks_at), critic)
    before = weights(trainer)
    trainer.train()
    assert not any(torch.equal(one, other) for one, other in zip(before, weights(trainer), strict=True))


class MaskingPolicyNet(torch.nn.Module):
    """Allows the actions that the observation allows, and never the last one."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 5)

    def forward(self, x):
        logits = self.layer(x["count"])
        mask = torch.tensor([True, True, False, True, False])
        return {"move": torch.where(mask, logits, torch.finfo(logits.dtype).min)}


def test_masked_actions_are_never_taken_and_training_stays_finite():
    trainer = build_trainer(counting_env)
    trainer.model.policy.networks[0] = MaskingPolicyNet()
    trainer = SAC(trainer.config, trainer.model, trainer.workers, None, None, seed=0)
    n_random = trainer.workers.replay_buffer.n_added
    trainer.train(n_epochs=3)
    taken = trainer.workers.replay_buffer.columns.actions[0]["move"][n_random : n_random + 12]
    assert set(taken.tolist()) <= {0, 1, 3}
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())


@pytest.mark.parametrize(("num_actors", "rollouts"), [(1, 1), (4, 4), (3, 1), (2, 4)])
def test_each_update_collects_the_configured_number_of_rollouts(num_actors, rollouts):
    trainer = build_trainer(random_walk_env, num_actors=num_actors, rollouts_per_iteration=rollouts, n_rollout_steps=2)
    before = trainer.workers.replay_buffer.n_added
    trainer.train()
    assert trainer.workers.replay_buffer.n_added - before == 4 * rollouts * 2


def test_whole_rollouts_can_be_stored_and_sampled():
    trainer = build_trainer(random_walk_env, split_rollouts_into_transitions=False, n_rollout_steps=5)
    assert len(trainer.workers.replay_buffer) == 30
    trainer.train()
    assert len(trainer.workers.replay_buffer) == 34
    assert len(trainer.workers.replay_buffer.sample_transitions(16, "cpu").terminated) == 16 * 5
    record = trainer.workers.sample_batch("cpu")
    assert record.batch_shape == [80]


def test_two_runs_with_the_same_seeds_are_bit_identical():
    make_env = partial(env_with_heads, HEADS["a dictionary of everything"])
    trainers = [build_trainer(make_env, n_epochs=2) for _ in range(2)]
    for trainer in trainers:
        trainer.train()
    other = build_trainer(make_env, n_epochs=2, seed=1)
    other.train()
    assert are_equal(weights(trainers[0]), weights(trainers[1]))
    assert not are_equal(weights(trainers[0]), weights(other))


def test_a_resumed_run_continues_with_the_same_learner_and_buffer(tmp_path):
    file = tmp_path / "latest.pt"
    first = build_trainer(random_walk_env, trainer_args={"checkpoint_file": file})
    first.train(n_epochs=1)
    second = build_trainer(random_walk_env, seed=5)
    second.load_state(file)
    assert are_equal(weights(first), weights(second))
    for trainer in (first, second):
        for _ in range(3):
            trainer.learn(trainer.workers.replay_buffer.sample_transitions(16, "cpu"))
    assert are_equal(weights(first), weights(second))
    assert second.epoch == 1


def test_a_checkpoint_of_another_algorithm_is_refused(tmp_path):
    trainer = build_trainer(random_walk_env)
    state = trainer.training_state()
    state["algorithm"] = "PPO"
    with pytest.raises(CheckpointError, match="run with PPO, but SAC"):
        trainer.load_training_state(state)


def test_a_signal_ends_the_run_after_its_update_with_its_state_saved(tmp_path, monkeypatch):
    file = tmp_path / "latest.pt"
    trainer = build_trainer(random_walk_env, epoch_length=50, trainer_args={"checkpoint_file": file})
    original, calls = trainer.learn, []

    def update(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    monkeypatch.setattr(trainer, "learn", update)
    with pytest.raises(TrainingInterrupted) as interrupted:
        trainer.train()
    assert interrupted.value.exit_status == 143
    assert load_state(file)["update"] == 3
    assert load_state(file)["replay_buffer"]["content"]["n_added"] == 33


def test_early_stopping_and_the_best_model(tmp_path, capsys):
    eval_env = SequentialVectorEnv([partial(counting_env, endings=((3, "truncated"),))] * 2)
    model_file = tmp_path / "best.pt"
    selection = BestModelSelection(str(model_file), None)
    trainer = build_trainer(
        partial(counting_env, endings=((3, "truncated"),)),
        n_epochs=20,
        patience=2,
        trainer_args={"model_selection": selection, "evaluator": RolloutEvaluator(eval_env, 2, selection)},
    )
    selection.model = trainer.model
    trainer.train()
    assert selection.best_reward == 6.0
    assert trainer.epoch < 5, "the reward never changes"
    assert "early stopping" in capsys.readouterr().out
    assert model_file.is_file()


class Rows(LogStatsWriter):
    def __init__(self):
        self.stats = {}

    def write(self, path, step, stats):
        self.stats.update({(key.event.__name__, key.output_name, key.group): value for key, value in stats.items()})


def test_documented_statistics_are_written_with_their_groups():
    rows = Rows()
    with StatsContext():
        register_log_stats_writer(rows)
        build_trainer(random_walk_env, epoch_length=20).train()
    names = {name for name, _, _ in rows.stats}
    assert names >= {
        "policy_loss", "policy_grad_norm", "policy_entropy", "policy_mean_logp", "errors_between_critics",
        "critic_value", "critic_value_loss", "critic_grad_norm", "time_dequeuing_actors", "time_learner_rollout",
        "time_loss_computation", "time_backprob", "entropy_coef", "entropy_loss", "estimated_queue_sizes",
        "buffer_size", "time_sampling_from_buffer", "buffer_avg_pick_per_transition", "reward",
    }  # fmt: skip
    assert rows.stats["buffer_size", None, None] == 50
    assert sum(value for (_, output, _), value in rows.stats.items() if output == "mean_percent") == pytest.approx(100)


def test_demonstrations_fill_the_buffer_with_their_true_endings():
    env = counting_env(endings=((3, "truncated"), (2, "terminated")))
    generator = RolloutGenerator(env, record_next_observations=True, terminate_on_done=True)
    policy = build_model(env).policy
    dataset = InMemoryDataset(
        [generator.rollout(policy, None) for _ in range(4)],
        trajectory_processor=NEXT_OBSERVATIONS,
    )
    buffer = UniformReplayBuffer(100, seed=0)
    add_demonstrations(buffer, dataset, item_length=1)
    batch = buffer.columns.read(np.arange(len(buffer)), "cpu")
    assert batch.terminated.tolist() == [False, False, False, False, True] * 2
    time, following = batch.observations[0]["count"][:, 0], batch.next_observations[0]["count"][:, 0]
    alive = ~batch.terminated
    assert torch.equal(following[alive], time[alive] + 1)


def test_demonstrations_are_cut_into_items_of_several_steps():
    """Episodes of three and of two steps; the remaining step of the longer ones is not used."""
    env = counting_env(endings=((3, "truncated"), (2, "terminated")))
    generator = RolloutGenerator(env, record_next_observations=True, terminate_on_done=True)
    policy = build_model(env).policy
    records = [generator.rollout(policy, None) for _ in range(4)]
    dataset = InMemoryDataset(records, trajectory_processor=NEXT_OBSERVATIONS)
    buffer = UniformReplayBuffer(100, seed=0)
    add_demonstrations(buffer, dataset, item_length=2)
    assert len(buffer) == 4
    batch = buffer.columns.read(np.arange(8), "cpu")
    assert batch.observations[0]["count"][:, 0].tolist() == [0, 1] * 4
    assert batch.terminated.tolist() == [False, False, False, True] * 2
    (item,) = buffer.sample_batch(1, "cpu")
    assert [step.observations[0]["count"].flatten()[0].item() for step in item.step_records] == [0, 1]


NEXT_OBSERVATIONS = {
    "_target_": "maze.core.trajectory_recording.datasets.trajectory_processor."
    "IdentityWithNextObservationTrajectoryProcessor"
}


class UseUpCoreEnv(ToyCoreEnv):
    """Each of three things can be used once: at the end of the episode nothing is allowed any more."""

    def reset(self):
        self.left = [1, 1, 1]
        return self.get_maze_state()

    def step(self, maze_action):
        assert self.left[int(maze_action["use"])], "an action that the mask forbids"
        self.left[int(maze_action["use"])] = 0
        return self.get_maze_state(), 1.0, not any(self.left), {}

    def get_maze_state(self):
        return {"n": [sum(self.left)], "use_mask": self.left}


class MaskedSubStepCoreEnv(ToyCoreEnv):
    """The second sub-step has a mask, and is hardly ever reached; the first one comes to an end by itself."""

    step_keys = ("a", "b")

    def reset(self):
        self.actor = ActorID("a", 0)
        return self.get_maze_state()

    def step(self, maze_action):
        if self.actor.step_key == "a":
            self.actor = ActorID("b", 0)
            return self.get_maze_state(), 0.0, bool(self.rng.random() < 0.95), {}
        assert maze_action["use"] != 1
        self.actor = ActorID("a", 0)
        return self.get_maze_state(), 1.0, False, {}

    def get_maze_state(self):
        return {"n": [self.rng.random()], "use_mask": [1, 0, 1]}


N = spaces.Box(0, 3, (1,), np.float32)
MASK = spaces.Box(0, 1, (3,), np.float32)


def use_up_env():
    use = PassOn(spaces.Dict({"use": spaces.Discrete(3)}))
    return MazeEnv(UseUpCoreEnv(), {0: use}, {0: Observe(spaces.Dict({"n": N, "use_mask": MASK}))})


def masked_sub_step_env():
    return MazeEnv(
        MaskedSubStepCoreEnv(),
        {"a": PassOn(spaces.Dict({"go": spaces.Discrete(2)})), "b": PassOn(spaces.Dict({"use": spaces.Discrete(3)}))},
        {"a": Observe(spaces.Dict({"n": N})), "b": Observe(spaces.Dict({"n": N, "use_mask": MASK}))},
    )


def masked_trainer(make_env, critic="", **config):
    """A trainer whose policy respects the mask of the environment."""
    trainer = build_trainer(make_env, critic, **config)
    key = list(trainer.model.policy.networks)[-1]
    trainer.model.policy.networks[key] = RespectsMask()
    return SAC(trainer.config, trainer.model, trainer.workers, None, None, seed=0)


class RespectsMask(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 3)

    def forward(self, x):
        logits = self.layer(x["n"])
        return {"use": torch.where(x["use_mask"] > 0, logits, torch.finfo(logits.dtype).min)}


def test_an_environment_whose_mask_changes_trains_from_its_first_random_step_on():
    """The environment refuses what its mask forbids, from the initial policy as well."""
    trainer = masked_trainer(use_up_env, n_rollout_steps=5)
    trainer.train()
    columns = trainer.workers.replay_buffer.columns
    n = len(columns)
    used, allowed = columns.actions[0]["use"][:n], columns.observations[0]["use_mask"][:n]
    assert allowed[np.arange(n), used].all()
    assert columns.next_observation["use_mask"][:n].any(-1).all(), "something to evaluate, in each row"


def test_demonstrations_of_an_environment_that_allows_nothing_at_its_end_are_learned_from():
    env, trainer = use_up_env(), masked_trainer(use_up_env, replay_buffer_size=40)
    generator = RolloutGenerator(env, record_next_observations=True, terminate_on_done=True)
    policy = trainer.model.policy
    records = [generator.rollout(policy, None) for _ in range(14)]
    assert not records[0].step_records[-1].substep_records[0].next_observation["use_mask"].any()
    add_demonstrations(
        trainer.workers.replay_buffer, InMemoryDataset(records, trajectory_processor=NEXT_OBSERVATIONS), 1
    )
    batch = trainer.workers.replay_buffer.columns.read(np.arange(40), "cpu")
    assert batch.next_observations[0]["use_mask"].any(-1).all()
    trainer.train()


@pytest.mark.parametrize("critic", ["", "Shared"])
def test_batches_without_masked_sub_steps_are_learned_from(critic):
    trainer = masked_trainer(masked_sub_step_env, critic, batch_size=2, initial_buffer_size=20, epoch_length=8)
    trainer.train()
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())


def test_demonstrations_in_one_record_keep_their_episodes_apart_and_their_actions_within_bounds():
    env = random_walk_env()
    policy = build_model(env, distributions=[]).policy
    trainer = build_trainer(random_walk_env, replay_buffer_size=200)
    record = RolloutGenerator(env).rollout(policy, 60)
    steps = [step.substep_records[0] for step in record.step_records]
    drawn = np.array([step.action["push"] for step in steps])
    assert np.abs(drawn).max() > 1
    first = trainer.workers.replay_buffer.n_rows_added
    dataset = InMemoryDataset(record, trajectory_processor=NEXT_OBSERVATIONS)
    add_demonstrations(trainer.workers.replay_buffer, dataset, 1)
    is_kept = np.array([not (step.done and step.info.get("TimeLimit.truncated")) for step in steps])
    is_kept[-1] = steps[-1].done and is_kept[-1]
    batch = trainer.workers.replay_buffer.columns.read(np.arange(first, first + is_kept.sum()), "cpu")
    np.testing.assert_array_equal(batch.actions[0]["push"], np.clip(drawn, -1, 1)[is_kept])
    assert batch.terminated.tolist() == [bool(step.done) for step, kept in zip(steps, is_kept, strict=True) if kept]
    following = [other.observation["position"] for other in [*steps[1:], steps[-1]]]
    expected = np.array(following)[is_kept][~batch.terminated.numpy()]
    np.testing.assert_array_equal(batch.next_observations[0]["position"][~batch.terminated], expected)


class ChoiceCoreEnv(ToyCoreEnv):
    """The second sub-step pays where it repeats what the first one chose, and the first one pays if it chose 1."""

    step_keys = ("first", "second")

    def reset(self):
        self.time, self.choice, self.actor = 0, 0, ActorID("first", 0)
        return self.get_maze_state()

    def step(self, maze_action):
        if self.actor.step_key == "first":
            self.choice, self.actor = int(maze_action["one"]), ActorID("second", 0)
            return self.get_maze_state(), 0.0, False, {}
        self.actor, self.time = ActorID("first", 0), self.time + 1
        reward = float(maze_action["two"] == self.choice) + 0.5 * self.choice
        return self.get_maze_state(), reward, self.time == 4, {}

    def get_maze_state(self):
        return {"choice": [self.choice - 0.5], "nothing": [0.0]}


def choice_env():
    box = spaces.Box(-1, 1, (1,), np.float32)
    return MazeEnv(
        ChoiceCoreEnv(),
        {
            "first": PassOn(spaces.Dict({"one": spaces.Discrete(2)})),
            "second": PassOn(spaces.Dict({"two": spaces.Discrete(2)})),
        },
        {"first": Observe(spaces.Dict({"nothing": box})), "second": Observe(spaces.Dict({"choice": box}))},
    )


def test_both_sub_steps_of_a_structured_environment_learn_what_pays():
    trainer = build_trainer(
        choice_env, epoch_length=80, batch_size=32, initial_buffer_size=200, replay_buffer_size=300,
        entropy_tuning=False, entropy_coef=0.02, tau=0.1, gamma=0.5, lr=0.03,
    )  # fmt: skip
    trainer.train()
    policy = trainer.model.policy
    first = policy.compute_substep_policy_output({"nothing": torch.zeros(1, 1)}, ActorID("first", 0))
    second = policy.compute_substep_policy_output({"choice": torch.tensor([[-0.5], [0.5]])}, ActorID("second", 0))
    assert first.action_logits["one"].softmax(-1)[0, 1] > 0.9
    assert second.action_logits["two"].softmax(-1).diagonal().min() > 0.9


def test_an_empty_data_set_is_refused():
    with pytest.raises(ConfigError, match="at least 1 environment steps"):
        add_demonstrations(UniformReplayBuffer(10, seed=0), InMemoryDataset(), item_length=1)


def test_a_state_critic_is_refused_with_the_critics_to_choose():
    from tests.train.trainers.common.test_structured_training import build_model as build_state_critic

    model = build_state_critic(random_walk_env(), "Step")
    workers = build_trainer(random_walk_env).workers
    assert isinstance(model, TorchActorCritic)
    with pytest.raises(ConfigError, match="critic=flatten_concat_state_action"):
        SAC({"rollout_evaluator": None}, model, workers, None, None)


def test_an_initial_buffer_larger_than_the_buffer_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.initial_buffer_size"):
        build_trainer(random_walk_env, initial_buffer_size=101)


def test_initial_policies_need_not_know_action_spaces():
    env = random_walk_env()
    policy = build_model(env).policy
    buffer = UniformReplayBuffer(50, seed=0)
    SACRunner.init_replay_buffer(buffer, policy, 20, 3, True, 1, random_walk_env)
    assert len(buffer) == 20


def test_the_runner_leaves_the_data_set_to_be_built_with_its_environment():
    config = {"_target_": "maze.core.trajectory_recording.datasets.in_memory_dataset.InMemoryDataset", "n_workers": 1}
    runner = Factory(SACDevRunner).instantiate(
        {"_target_": f"{SACDevRunner.__module__}.SACDevRunner", "initial_demonstration_trajectories": config}
    )
    assert runner.initial_demonstration_trajectories == config
