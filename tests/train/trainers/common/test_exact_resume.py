"""A training that was stopped and resumed equals the one that never stopped, bit for bit, for every trainer."""

import copy
import functools
import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from maze.core.agent.random_policy import RandomPolicy
from maze.core.errors import CheckpointError, ConfigError, NonFiniteError
from maze.core.log_stats.log_stats import LogStatsWriter, StatsContext, register_log_stats_writer
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.trajectory_recording.datasets.in_memory_dataset import InMemoryDataset
from maze.core.utils.checkpoint import load_state, save_state
from maze.core.utils.factory import Factory
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.runner import Runner
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.common.actor_critic.actor_critic_trainer import SurrogateLoss
from maze.train.utils.run_process import TrainingInterrupted
from maze.train.utils.train_utils import STATE_FORMAT, from_plain

NORMALIZATION = (
    "maze.core.wrappers.return_normalization_reward_wrapper.ReturnNormalizationRewardWrapper",
    {"gamma": 0.9, "epsilon": 1e-6},
)
ACTOR_CRITIC = (
    *("critic=flatten_concat_shared", "algorithm.n_rollout_steps=12", "algorithm.epoch_length=2"),
    *("algorithm.rollout_evaluator.n_episodes=2", "algorithm.rollout_evaluator.deterministic=false"),
)
TWICE = "algorithm.n_optimization_epochs=2"
SAC = (
    *("critic=flatten_concat_state_action", "algorithm.epoch_length=8", "algorithm.n_rollout_steps=2"),
    *("algorithm.rollout_evaluator.n_episodes=2", "algorithm.num_actors=2", "algorithm.rollouts_per_iteration=2"),
    *("algorithm.batch_size=4", "algorithm.replay_buffer_size=60", "algorithm.lr=0.01"),
)
DQN = (
    *("critic=flatten_concat_shared", "algorithm.epoch_length=8", "algorithm.n_rollout_steps=2"),
    *("algorithm.rollout_evaluator.n_episodes=2", "algorithm.num_actors=2", "algorithm.rollouts_per_iteration=2"),
    *("algorithm.batch_size=4", "algorithm.replay_buffer_size=60", "algorithm.initial_buffer_size=20"),
    *("algorithm.target_update_interval=5", "algorithm.epsilon_decay_steps=60", "algorithm.n_step_returns=3"),
)
OFFLINE = (
    *("algorithm.epoch_length=4", "algorithm.batch_size=8", "algorithm.rollout_evaluator.n_episodes=2"),
    *("algorithm.lr=0.01", "algorithm.tau=0.1"),
)
RECURRENT = (
    *("algorithm=ppo", "model=auto", "model.recurrence=carried", "critic=template_state", *ACTOR_CRITIC[1:]),
    *("algorithm.sequence_length=5", "runner.concurrency=2", "algorithm.batch_size=8", TWICE),
    *("algorithm.constraints=['reward <= 15']", "algorithm.reward_scaling=true", "algorithm.risk=cvar:0.5"),
)
NORMALIZED = (
    "model=auto",
    "model.normalize_observations=true",
    "critic=template_state",
    "algorithm.reward_scaling=true",
)
NORMALIZED_SAC = ("model=auto", "model.normalize_observations=true", "critic=template_state_action")
PPO = (*ACTOR_CRITIC, *NORMALIZED, "runner.concurrency=2", "algorithm.batch_size=8", TWICE)
TRAININGS = {
    "a2c": ("algorithm=a2c", *ACTOR_CRITIC, "runner.concurrency=2"),
    "ppo": ("algorithm=ppo", *PPO),
    "ppo-constrained": ("algorithm=ppo", *PPO, "algorithm.constraints=['reward <= 15']"),
    "ppo-risk": ("algorithm=ppo", *PPO, "algorithm.risk=0.5*mean+0.5*cvar:0.4", "algorithm.gae_lambda=0.9"),
    "ppo-processes": ("algorithm=ppo", *PPO, "runner=local"),
    "ppo-recurrent": (*RECURRENT, "runner=dev"),
    "ppo-recurrent-processes": (*RECURRENT, "runner=local"),
    "impala": ("algorithm=impala", *ACTOR_CRITIC, "algorithm.num_actors=3", "algorithm.actors_batch_size=2"),
    "sac": ("algorithm=sac", *SAC, "algorithm.initial_buffer_size=20"),
    "sac-ahead": (
        "algorithm=sac",
        *SAC,
        *NORMALIZED_SAC,
        "algorithm.initial_buffer_size=20",
        "algorithm.collect_ahead=true",
    ),
    "sac-processes": ("algorithm=sac", *SAC, *NORMALIZED_SAC, "algorithm.initial_buffer_size=20", "runner=local"),
    "sacfd": ("algorithm=sacfd", *SAC, "algorithm.initial_buffer_size=20"),
    "dqn": ("algorithm=dqn", *DQN),
    "dqn-risk": ("algorithm=dqn", *DQN, "algorithm.risk=cvar:0.3", "algorithm.prioritized=true"),
    "dqn-prioritized": (
        "algorithm=dqn",
        *DQN,
        "algorithm.prioritized=true",
        "algorithm.tau=0.1",
        "algorithm.collect_ahead=true",
    ),
    "dcl": (
        "algorithm=dcl",
        *("algorithm.states=20", "algorithm.states_per_update=10", "algorithm.scenarios=2", "algorithm.horizon=3"),
        *("algorithm.n_passes=2", "algorithm.rollout_evaluator.n_episodes=2", "model=auto"),
        "model.normalize_observations=true",
    ),
    "self_labelling": (
        "algorithm=self_labelling",
        *("algorithm.instances=2", "algorithm.samples=2", "algorithm.epoch_length=2", "model=auto"),
        *("algorithm.rollout_evaluator.n_episodes=2", "model.normalize_observations=true"),
    ),
    "bc": ("algorithm=bc", "algorithm.device=cpu", "algorithm.batch_size=8", "algorithm.n_eval_episodes=2"),
    "cql": ("algorithm=cql", *OFFLINE, "algorithm.target_update_interval=3"),
    "iql": ("algorithm=iql", *OFFLINE, *NORMALIZED_SAC),
    "es": ("algorithm=es", "algorithm.n_rollouts_per_update=4", "algorithm.max_steps=20", "runner.n_eval_rollouts=2"),
}
LEARNS_ALONE = ("bc", "cql", "es", "iql")
MAY_TAKE_LONG = ("ppo-recurrent", "impala", "sac-ahead", "dqn", "dcl", "self_labelling", "cql", "es")
ONE_OF_EACH_KIND = ["ppo", "sac", "bc", *(pytest.param(name, marks=pytest.mark.long) for name in MAY_TAKE_LONG)]
"""One run of each learner and of each kind of state between updates; resumed in all places at which it may stop."""
OTHERS = [name for name in TRAININGS if name not in ("ppo", "sac", "bc", *MAY_TAKE_LONG)]
EXTENDED = ["ppo-recurrent-processes", "dqn-prioritized", "iql", "bc", "es", "dcl", "self_labelling"]
"""Runs of each kind of learner; a signal within an epoch, with which all are tested, leaves more to be restored."""
N_EPOCHS = 4


@functools.cache
def composed(name):
    with initialize_config_module("maze.conf", version_base="1.3"):
        chosen = {each.split("=")[0]: each for each in ("model=flatten_concat", *TRAININGS[name])}  # the last one wins
        cfg = compose("conf_train", overrides=["env.name=CartPole-v1", *chosen.values()])
    for cell in ("seeding.env_base_seed", "seeding.agent_base_seed"):
        OmegaConf.update(cfg, cell, 11)
    if not name.startswith("es"):
        cfg.runner.eval_concurrency = 2
    if name not in LEARNS_ALONE:
        OmegaConf.update(cfg, "wrappers", {NORMALIZATION[0]: NORMALIZATION[1]}, force_add=True)
    return cfg


@functools.cache
def demonstrations():
    env = GymMazeEnv("CartPole-v1")
    env.seed(1)
    policy = RandomPolicy(env.action_spaces_dict)
    policy.seed(1)
    generator = RolloutGenerator(env, terminate_on_done=True, record_next_observations=True)
    return InMemoryDataset([generator.rollout(policy, None) for _ in range(3)])


class Recorder(LogStatsWriter):
    """Writes down all statistics that do not tell how long something took."""

    def __init__(self):
        self.rows = []

    def write(self, path, step, stats):
        for key, value in stats.items():
            if "time" not in key.event.__name__:
                row = (step, path, key.event.__qualname__, key.output_name, key.group)
                self.rows.append((*row, comparable(value)))


def comparable(value):
    """The same for equal numbers of equal types only."""
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray | np.generic):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(item) for item in value]
    return "nan" if isinstance(value, float) and math.isnan(value) else (type(value).__name__, value)


class Run:
    """A run in a directory of its own, as the command line makes it."""

    def __init__(self, name, directory, n_epochs=N_EPOCHS, prepare=None, **overrides):
        directory.mkdir()
        cfg = copy.deepcopy(composed(name))
        cfg.algorithm.n_epochs = n_epochs
        for key, value in overrides.items():
            OmegaConf.update(cfg, key.replace("__", "."), value)
        self.recorder, self.interrupted = Recorder(), False
        previous = Path.cwd()
        os.chdir(directory)
        try:
            with StatsContext():
                self.runner = Factory(Runner).instantiate(cfg.runner)
                if name in ("bc", "cql", "iql"):
                    self.runner.dataset = demonstrations()
                if name == "sacfd":
                    self.runner.initial_demonstration_trajectories = demonstrations()
                self.runner.setup(cfg)
                register_log_stats_writer(self.recorder)
                if prepare is not None:
                    prepare(self.runner.trainer)
                try:
                    self.runner.run()
                except (TrainingInterrupted, Killed):
                    self.interrupted = True
                self.state = load_state("latest.pt")
        finally:
            if hasattr(self, "runner"):
                self.runner.close()
            os.chdir(previous)

    @property
    def result(self):
        """All that the training consists of, apart from seconds."""
        left_out = ("log_step", "update_statistics", "statistics")
        return {key: comparable(value) for key, value in self.state.items() if key not in left_out}


class Killed(BaseException):
    """Ends a process without giving it time for anything."""


def signal_after(n_updates):
    def prepare(trainer):
        update, n_done = trainer._update, iter(range(1, 1000))

        def counted():
            update()
            if next(n_done) == n_updates:
                os.kill(os.getpid(), signal.SIGTERM)

        trainer._update = counted

    return prepare


def signal_in_evaluation(trainer):
    evaluate_if_due = trainer.evaluate_if_due

    def interrupted():
        evaluate_if_due()
        os.kill(os.getpid(), signal.SIGTERM)

    trainer.evaluate_if_due = interrupted


def killed_after_saving(n_saved):
    def prepare(trainer):
        save, n_done = trainer.save, iter(range(1, 1000))

        def counted(*args, **kwargs):
            save(*args, **kwargs)
            if next(n_done) == n_saved:
                raise Killed

        trainer.save = counted

    return prepare


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return functools.cache(lambda name: Run(name, tmp_path_factory.mktemp(name) / "run"))


def differing(one, other):
    return [key for key in one if one[key] != other[key]]


def check(expected, *runs):
    assert differing(expected.result, runs[-1].result) == []
    assert [row for run in runs for row in run.recorder.rows] == expected.recorder.rows


@pytest.mark.parametrize("name", EXTENDED)
def test_two_epochs_and_two_resumed_epochs_equal_four_epochs(name, tmp_path, uninterrupted, caplog):
    first = Run(name, tmp_path / "first", n_epochs=2)
    resumed = Run(name, tmp_path / "second", input_dir=str(tmp_path / "first"), resume=True)
    assert "not resumed exactly" not in caplog.text
    check(uninterrupted(name), first, resumed)


N_UPDATES = {"sac-processes": 19, "sacfd": 19, "dqn-risk": 19, "dqn-prioritized": 19, "iql": 10}


@pytest.mark.parametrize("name", OTHERS)
def test_a_run_stopped_by_a_signal_and_resumed_equals_the_uninterrupted_one(name, tmp_path, uninterrupted, caplog):
    first = Run(name, tmp_path / "first", prepare=signal_after(N_UPDATES.get(name, 5)))
    assert first.interrupted
    resumed = Run(name, tmp_path / "second", input_dir=str(tmp_path / "first"), resume=True)
    assert "not resumed exactly" not in caplog.text
    check(uninterrupted(name), first, resumed)


def signal_in_step_of_evaluation(n_steps):
    def prepare(trainer):
        env = trainer.evaluator.eval_env
        step, n_done = env.step, iter(range(1, 1000))

        def counted(*args, **kwargs):
            if next(n_done, None) == n_steps:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(*args, **kwargs)

        env.step = counted

    return prepare


@pytest.mark.parametrize("name", ["ppo", pytest.param("ppo-processes", marks=pytest.mark.long), "sac"])
def test_an_evaluation_that_a_signal_ends_is_repeated_by_the_resumed_run(name, tmp_path, uninterrupted, caplog):
    expected = uninterrupted(name)
    for n_steps in (1, 60):
        first = Run(name, tmp_path / f"first {n_steps}", prepare=signal_in_step_of_evaluation(n_steps))
        assert first.interrupted
        origin = {"input_dir": str(tmp_path / f"first {n_steps}"), "resume": True}
        resumed = Run(name, tmp_path / f"second {n_steps}", **origin)
        assert "not resumed exactly" not in caplog.text
        check(expected, first, resumed)


@pytest.mark.parametrize("name", ["ppo", "sac", "sac-ahead", "bc"])
def test_a_killed_run_is_resumed_from_its_last_epoch(name, tmp_path, uninterrupted):
    Run(name, tmp_path / "first", prepare=killed_after_saving(3))
    resumed = Run(name, tmp_path / "second", input_dir=str(tmp_path / "first"), resume=True)
    expected = uninterrupted(name)
    assert differing(expected.result, resumed.result) == []
    rows = resumed.recorder.rows
    assert rows == expected.recorder.rows[-len(rows) :]
    assert rows[0][0] > 1  # log steps go on


def test_resuming_twice_is_as_good_as_once(tmp_path, uninterrupted):
    Run("ppo", tmp_path / "0", prepare=signal_after(1))
    for index in range(1, 4):
        prepare = signal_after(2) if index < 3 else None
        run = Run("ppo", tmp_path / f"{index}", prepare=prepare, input_dir=str(tmp_path / f"{index - 1}"), resume=True)
    assert differing(uninterrupted("ppo").result, run.result) == []


FIRST_AND_ALL_UPDATES = {"sac": (19, 32), "sac-ahead": (19, 32), "dqn": (19, 32), "cql": (10, 16), "dcl": (5, 16)} | {
    "bc": (2, N_EPOCHS),
    "es": (3, N_EPOCHS),
}


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_signals_before_the_first_update_within_an_epoch_and_in_the_last_update_lose_nothing(
    name, tmp_path, uninterrupted, caplog
):
    """A signal before the first update of a fresh or a resumed run may arrive during an evaluation or the set-up."""
    runs, origin = [], {}
    n_first, n_all = FIRST_AND_ALL_UPDATES.get(name, (5, 8))
    signals = (signal_in_evaluation, signal_after(n_first), signal_in_evaluation, signal_after(n_all - n_first))
    for index, prepare in enumerate(signals):
        runs.append(Run(name, tmp_path / f"{index}", prepare=prepare, **origin))
        assert runs[-1].interrupted
        origin = {"input_dir": str(tmp_path / f"{index}"), "resume": True}
    assert runs[-1].state["n_updates"] == n_all  # the last evaluation is missing
    runs.append(Run(name, tmp_path / "last", **origin))
    check(uninterrupted(name), *runs)
    idle = Run(name, tmp_path / "idle", input_dir=str(tmp_path / "last"), resume=True)  # nothing is left
    assert "not resumed exactly" not in caplog.text
    assert differing(runs[-1].result, idle.result) == []
    assert not idle.recorder.rows


def test_environments_in_processes_can_be_resumed_in_this_one(tmp_path, uninterrupted):
    Run("ppo-processes", tmp_path / "first", prepare=signal_after(3))
    resumed = Run("ppo", tmp_path / "second", input_dir=str(tmp_path / "first"), resume=True)
    assert differing(uninterrupted("ppo").result, resumed.result) == []
    assert differing(uninterrupted("ppo").result, uninterrupted("ppo-processes").result) == []


def test_hidden_states_of_environments_in_processes_can_be_carried_on_in_this_one(tmp_path, uninterrupted):
    Run("ppo-recurrent-processes", tmp_path / "first", prepare=signal_after(3))
    resumed = Run("ppo-recurrent", tmp_path / "second", input_dir=str(tmp_path / "first"), resume=True)
    expected = uninterrupted("ppo-recurrent").result
    assert differing(expected, resumed.result) == []
    assert differing(expected, uninterrupted("ppo-recurrent-processes").result) == []


def test_replay_buffer_and_learned_weights_are_independent_of_the_placement(uninterrupted):
    assert differing(uninterrupted("sac-ahead").result, uninterrupted("sac-processes").result) == []


def test_seeds_are_inherited_and_the_best_model_is_in_the_new_directory(tmp_path, uninterrupted):
    Run("es", tmp_path / "first", prepare=signal_after(2))
    overrides = {"seeding__env_base_seed": None, "seeding__agent_base_seed": None}
    second = tmp_path / "second"
    resumed = Run("es", second, n_epochs=2, input_dir=str(tmp_path / "first"), resume=True, **overrides)
    assert resumed.state["seeds"] == {"env_base_seed": 11, "agent_base_seed": 11}
    assert (second / "state_dict.pt").is_file()
    with pytest.raises(ConfigError, match=r"seeding.env_base_seed: the resumed run has the seed 11, found 12"):
        Run("es", tmp_path / "third", input_dir=str(second), resume=True, seeding__env_base_seed=12)


def test_a_buffer_too_large_to_save_every_epoch_is_reported_as_lost(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("maze.train.trainers.common.replay_trainer.ALWAYS_SAVED_BYTES", 10)
    Run("sac", tmp_path / "first", prepare=killed_after_saving(2))
    resumed = Run("sac", tmp_path / "second", input_dir=str(tmp_path / "first"), resume=True)
    assert resumed.state["epoch"] == N_EPOCHS
    assert "the replay buffer was too large to be saved with every epoch" in caplog.text


def n_starts(run):
    return run.state["parts"]["rollouts"]["n_starts"]


@pytest.mark.slow
def test_actors_in_processes_resume_with_new_episodes_and_a_warning(tmp_path, caplog):
    local = {"runner___target_": "maze.train.trainers.impala.impala_runners.ImpalaLocalRunner"}
    first = Run("impala", tmp_path / "first", n_epochs=1, **local)
    resumed = Run("impala", tmp_path / "second", n_epochs=2, input_dir=str(tmp_path / "first"), resume=True, **local)
    assert "begin new episodes (asynchronous actors run ahead of the learner" in caplog.text
    assert resumed.state["epoch"] == 2
    assert n_starts(resumed) == n_starts(first) + 1


# -- without resume ---------------------------------------------------------------------------------


def test_without_resume_only_weights_are_loaded(tmp_path):
    first = Run("impala", tmp_path / "first", n_epochs=1)
    best = load_state(tmp_path / "first" / "state_dict.pt")
    initial = []

    def look(trainer):
        initial.append(copy.deepcopy(trainer.model.state_dict()))

    second = Run("a2c", tmp_path / "second", 1, look, input_dir=str(tmp_path / "first"), algorithm__lr=0.1)
    assert comparable(initial[0]) == comparable(best)
    assert second.state["epoch"] == 1
    assert first.state["epoch"] == 1


def test_a_run_without_an_evaluated_model_still_has_weights_to_start_from(tmp_path):
    first = Run("ppo", tmp_path / "first", n_epochs=1)
    (tmp_path / "first" / "state_dict.pt").unlink()
    initial = []
    directory = str(tmp_path / "first")
    Run("ppo", tmp_path / "second", 1, lambda trainer: initial.append(trainer.epoch), input_dir=directory)
    assert initial == [0]
    assert first.state["epoch"] == 1


# -- errors -----------------------------------------------------------------------------------------


def refused(tmp_path, name="ppo", **overrides):
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        Run(name, tmp_path / "refused", resume=True, **overrides)
    assert isinstance(caught.value, ConfigError)
    return str(caught.value)


def test_resuming_needs_a_directory(tmp_path):
    message = refused(tmp_path)
    assert message.startswith("resume: ")
    assert "no input_dir is given" in message
    assert "input_dir=outputs" in message


def test_resuming_needs_the_directory_to_exist(tmp_path):
    assert "nowhere/latest.pt" in refused(tmp_path, input_dir=str(tmp_path / "nowhere"))


def test_resuming_needs_the_state_of_a_run(tmp_path):
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    save_state(earlier / "state_dict.pt", {"policies": {}})
    message = refused(tmp_path, input_dir=str(earlier))
    assert "earlier/latest.pt" in message
    assert "found no such file" in message


def test_weights_with_names_of_a_run_state_are_distinguished_from_it(tmp_path):
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    save_state(earlier / "latest.pt", {"policies": {}})
    assert "found weights alone" in refused(tmp_path, input_dir=str(earlier))


def test_another_algorithm_cannot_resume(tmp_path):
    Run("ppo", tmp_path / "earlier", n_epochs=1)
    message = refused(tmp_path, "a2c", input_dir=str(tmp_path / "earlier"))
    assert message.startswith("algorithm, model: ")
    assert "is the state of a run with PPO, but A2C is configured" in message


def test_another_model_cannot_resume(tmp_path):
    Run("ppo", tmp_path / "earlier", n_epochs=1)
    message = refused(tmp_path, input_dir=str(tmp_path / "earlier"), model__hidden_units=[5])
    assert message.startswith("algorithm, model: ")
    assert "does not fit the model" in message
    assert "leave out `resume=true`" in message


def test_resume_is_yes_or_no(tmp_path):
    with pytest.raises(ConfigError, match=r"resume: expected true or false, found 'latest'"):
        Run("ppo", tmp_path / "refused", resume="latest", input_dir=str(tmp_path))


# -- numbers that are not finite --------------------------------------------------------------------


def test_the_file_that_is_left_by_a_number_that_is_not_finite_brings_the_environments_back(tmp_path):
    def break_loss(trainer):
        loss = trainer._policy_loss
        trainer._policy_loss = lambda *args: SurrogateLoss(loss(*args).policy * math.nan)

    with pytest.raises(NonFiniteError):
        Run("a2c", tmp_path / "broken", prepare=break_loss)
    (file,) = (tmp_path / "broken").glob("non_finite_*.pt")
    environments = from_plain(load_state(file)["training_state"]["parts"]["rollouts"])["environments"]
    env = SequentialVectorEnv([functools.partial(GymMazeEnv, "CartPole-v1")] * 2)
    without = [{**state, "statistics": [], "wrappers": []} for state in environments]
    assert env.load_state_dict({"environments": without}) == {}
    assert all(len(state["sequence"]) == 12 for state in environments)


# -- other releases ---------------------------------------------------------------------------------


def test_a_state_of_a_later_release_names_the_versions(tmp_path):
    first = Run("ppo", tmp_path / "first", n_epochs=1)
    save_state(tmp_path / "first" / "latest.pt", {**first.state, STATE_FORMAT: 99})
    message = refused(tmp_path, input_dir=str(tmp_path / "first"))
    assert "has version 99" in message
