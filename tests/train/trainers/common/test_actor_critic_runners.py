"""Training runs from a configuration."""

import os
import signal

import pytest
import torch

from maze.core.errors import CheckpointError, ConfigError
from maze.core.log_stats.log_stats import StatsContext
from maze.core.utils.checkpoint import load_state
from maze.maze_cli import main
from maze.perception.models.space_config import SpacesConfig
from maze.runner import Runner
from maze.train.parallelization.placement import InProcess
from maze.train.trainers.a2c.a2c_trainer import A2C
from maze.train.trainers.common.actor_critic.actor_critic_runners import ACDevRunner, ACLocalRunner
from maze.train.trainers.es import ESDevRunner
from maze.train.trainers.imitation.bc_runners import BCDevRunner
from maze.train.trainers.imitation.bc_trainer import BCTrainer
from maze.train.trainers.impala.impala_runners import ImpalaDevRunner
from maze.train.trainers.ppo.ppo_trainer import PPO
from maze.train.trainers.sac.sac_runners import SACDevRunner
from maze.train.utils.run_process import TrainingInterrupted
from tests.configs import cartpole_training


def composed(algorithm="ppo", **overrides):
    return cartpole_training(algorithm, **overrides)


@pytest.fixture(autouse=True)
def in_run_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with StatsContext():
        yield tmp_path


@pytest.fixture
def start():
    runners = []

    def build(cfg, runner_class=ACDevRunner, trainer_class=PPO, **arguments):
        arguments = {"concurrency": 2, "eval_concurrency": 1, **arguments}
        runner = runner_class(trainer_class=trainer_class, **arguments)
        runners.append(runner)
        runner.setup(cfg)
        return runner

    yield build
    for runner in runners:
        runner.close()


def weights(runner):
    return [parameter.detach().clone() for parameter in runner.trainer.model.parameters()]


def test_a_run_trains_and_writes_the_documented_files(start, in_run_directory, capsys):
    runner = start(composed())
    assert isinstance(runner, Runner)
    runner.run()
    names = {file.name for file in in_run_directory.iterdir()}
    assert {"state_dict.pt", "latest.pt", "spaces_config.pkl"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert load_state("latest.pt")["epoch"] == 1
    spaces = SpacesConfig.load("spaces_config.pkl")
    assert list(spaces.observation_spaces_dict[0].spaces) == ["observation"]
    output = capsys.readouterr().out
    assert "-> new overall best model" in output
    assert "Update epoch - 1" in output


@pytest.mark.parametrize(("name", "trainer_class"), [("a2c", A2C), ("ppo", PPO)])
def test_the_trainer_is_named_by_its_path_and_configured_by_the_algorithm(start, name, trainer_class):
    cfg = composed(name, algorithm__lr=0.123)
    runner = start(cfg, trainer_class=cfg.runner.trainer_class)
    assert type(runner.trainer) is trainer_class
    assert runner.trainer.config.lr == 0.123


def test_runs_with_the_same_seeds_are_bit_identical_in_every_placement(start):
    results = []
    for runner_class in (ACDevRunner, ACDevRunner, ACLocalRunner):
        runner = start(composed(), runner_class=runner_class)
        runner.run()
        results.append(weights(runner))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_initial_weights_follow_from_the_agent_seed(start):
    first, second = (weights(start(composed(seeding__agent_base_seed=seed))) for seed in (2, 3))
    again = weights(start(composed()))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_number_of_environments_is_chosen_where_it_is_zero(start):
    runner = start(composed(), concurrency=0, eval_concurrency=0)
    assert runner.trainer.rollout_generator.env.n_envs == max(8, os.cpu_count())
    assert runner.trainer.evaluator.eval_env.n_envs == 2  # as many as episodes


def test_a_run_starts_from_the_model_of_an_earlier_one(start, tmp_path):
    first = start(composed())
    first.run()
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (tmp_path / "state_dict.pt").rename(earlier / "state_dict.pt")
    second = start(composed("a2c", input_dir=str(earlier), seeding__agent_base_seed=9), trainer_class=A2C)
    saved = load_state(earlier / "state_dict.pt")
    assert torch.equal(
        next(iter(second.trainer.model.policy.state_dict()["policies"][0].values())),
        next(iter(saved["policies"][0].values())),
    )


@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_an_input_directory_without_a_model_is_refused_with_the_way_out(start, tmp_path, kind):
    directory = tmp_path / "earlier"
    if kind == "empty":
        directory.mkdir()
    with pytest.raises(ConfigError, match=r"input_dir: .*earlier.*maze-run -cn conf_train"):
        start(composed(input_dir=str(directory)))


def test_a_broken_checkpoint_in_the_input_directory_is_named(start, tmp_path):
    directory = tmp_path / "earlier"
    directory.mkdir()
    (directory / "state_dict.pt").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(CheckpointError, match=r"earlier.state_dict\.pt"):
        start(composed(input_dir=str(directory)))


def test_a_model_without_critic_is_refused(start):
    with pytest.raises(ConfigError, match=r"model\.critic: PPO needs a model with a policy and a state critic"):
        start(composed(model__critic=None))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"concurrency": -1}, r"runner\.concurrency"),
        ({"eval_concurrency": 1.5}, r"runner\.eval_concurrency"),
        (
            {"trainer_class": "maze.runner.Runner"},
            r"runner\.trainer_class: `maze.runner.Runner` is not a subclass of Trainer",
        ),
        ({"trainer_class": BCTrainer}, r"runner\.trainer_class: BCTrainer does not train a PPOAlgorithmConfig"),
        ({"placement": "procesess"}, r"runner\.placement: expected one of in_process, processes"),
    ],
)
def test_wrong_arguments_of_the_runner_are_named(start, arguments, message):
    with pytest.raises(ConfigError, match=message):
        start(composed(), **arguments)


def test_components_are_not_there_before_setup():
    with pytest.raises(ConfigError, match="was not set up"):
        _ = ACDevRunner(trainer_class=PPO).trainer


def test_worker_processes_are_gone_after_an_interrupted_run(start):
    runner = start(composed(), runner_class=ACLocalRunner)
    update = runner.trainer._update

    def interrupted():
        os.kill(os.getpid(), signal.SIGTERM)
        update()

    runner.trainer._update = interrupted
    pids = [worker.process.pid for worker in runner.trainer.rollout_generator.env._pool.workers]
    with pytest.raises(TrainingInterrupted) as interruption:
        runner.run()
    assert interruption.value.exit_status == 143
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_documented_runner_keys_take_precedence_over_the_algorithm(start):
    runner = start(composed(algorithm__critic_burn_in_epochs=1), eval_repeats=3, critic_burn_in_epochs=2)
    assert runner.trainer.config.critic_burn_in_epochs == 2
    assert runner.trainer.evaluator.n_episodes == 3
    runner = start(composed(algorithm__critic_burn_in_epochs=1))
    assert runner.trainer.config.critic_burn_in_epochs == 1
    assert runner.trainer.evaluator.n_episodes == 2


def test_episodes_to_evaluate_need_an_evaluator(start):
    with pytest.raises(ConfigError, match=r"runner\.eval_repeats: expected a configured evaluator"):
        start(composed("a2c", algorithm__rollout_evaluator=None), trainer_class=A2C, eval_repeats=3)


@pytest.mark.parametrize(("name", "value"), [("eval_repeats", 0), ("critic_burn_in_epochs", -1)])
def test_invalid_runner_values_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"runner\.{name}: expected a whole number of at least"):
        ACDevRunner(trainer_class=PPO, **{name: value})


@pytest.mark.parametrize(
    ("runner_class", "name", "instead"),
    [
        (ImpalaDevRunner, "concurrency", "algorithm.num_actors"),
        (SACDevRunner, "concurrency", "algorithm.num_actors"),
        (BCDevRunner, "concurrency", "runner.eval_concurrency"),
        (ESDevRunner, "eval_concurrency", "runner.concurrency"),
    ],
)
def test_numbers_of_environments_that_would_have_no_effect_are_refused_with_what_has(runner_class, name, instead):
    with pytest.raises(ConfigError, match=rf"runner\.{name}: leave it 0 and set {instead}"):
        runner_class(**{name: 2})


def test_a_command_releases_the_resources_of_its_runner(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(InProcess, "close", lambda self: closed.append(type(self)))
    few = ["algorithm.n_epochs=1", "algorithm.epoch_length=1", "algorithm.rollout_evaluator.n_episodes=1"]
    options = ["-cn", "conf_train", "env.name=CartPole-v1", "algorithm=a2c", "runner.concurrency=1", *few]
    assert main([*options, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    assert closed == [InProcess]
