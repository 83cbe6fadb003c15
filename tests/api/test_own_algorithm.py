"""An algorithm in a project of its own: nothing but its configuration's `_target_` makes it known."""

import textwrap
from pathlib import Path

import pytest

from maze.api.run_context import RunContext
from maze.core.errors import ConfigError
from maze.core.utils.checkpoint import load_state
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.maze_cli import main

PROJECT = """
from dataclasses import dataclass

from maze.train.trainers.a2c.a2c_trainer import A2C
from maze.train.trainers.common.config_classes import ActorCriticConfig
from maze.train.trainers.common.evaluators.evaluator import default_rollout_evaluator
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.trainer import EpochTrainer
from maze.train.trainers.sac.sac_algorithm_config import SACAlgorithmConfig


@dataclass
class GradientConfig(ActorCriticConfig):
    trainer = "own_project.Gradient"

    lr: float = 0.0123
    rollout_evaluator: object = None


class Gradient(A2C):
    config_class = GradientConfig


@dataclass
class CarefulConfig(GradientConfig):
    name = "careful_gradient"


class NamelessConfig(AlgorithmConfig):
    pass


@dataclass
class QConfig(SACAlgorithmConfig):
    pass


@dataclass
class CriticlessConfig(AlgorithmConfig):
    trainer = "own_project.Criticless"


class Criticless(EpochTrainer):
    @classmethod
    def build(cls, run):
        assert run.algorithm.critic is None
        raise ValueError(f"built for {type(run.placement).__name__} with {run.concurrency}")
"""
TARGET = "algorithm._target_=own_project.GradientConfig"
SHORT = ("algorithm.n_epochs=1", "algorithm.epoch_length=1", "algorithm.n_rollout_steps=4", "runner.concurrency=2")
TRAINING = ("-cn", "conf_train", "env.name=CartPole-v1", "seeding.env_base_seed=1", "seeding.agent_base_seed=1")


@pytest.fixture(autouse=True)
def _in_an_own_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_project.py").write_text(PROJECT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)


def weights(directory):
    return load_state(Path(directory) / "latest.pt")["model"]


def test_the_command_line_trains_it_by_its_target_alone(tmp_path, capfd):
    assert main([*TRAINING, TARGET, *SHORT]) == 0
    (run,) = (tmp_path / "outputs").glob("*/*/latest.pt")
    assert "-gradient-" in run.parent.parent.name
    assert load_state(run)["algorithm"] == "Gradient"
    config = (run.parent / "hydra_config.yaml").read_text()
    assert "_target_: own_project.GradientConfig" in config
    assert "lr: 0.0123" in config  # its own defaults, and none of another algorithm
    assert "noise_stddev" not in config


def test_a_user_algorithm_learns_the_same_in_every_placement(tmp_path):
    for runner in ("dev", "local"):
        assert main([*TRAINING, TARGET, *SHORT, f"runner={runner}", f"hydra.run.dir={runner}"]) == 0
    one, other = weights("dev"), weights("local")
    assert str(one) == str(other)


def test_a_file_in_a_directory_of_configurations_names_it(tmp_path):
    file = tmp_path / "conf" / "algorithm" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(
        textwrap.dedent("""\
            # @package algorithm
            _target_: own_project.GradientConfig
            n_epochs: 1
            epoch_length: 1
            n_rollout_steps: 4
            """)
    )
    command = ["-cd", "conf", *TRAINING, "algorithm=mine", "runner=local", "runner.concurrency=2"]
    assert main([*command, "hydra.run.dir=run"]) == 0
    assert load_state(tmp_path / "run" / "latest.pt")["algorithm"] == "Gradient"


def test_run_context_takes_the_object_the_mapping_and_the_override():
    import own_project

    small = {"n_epochs": 1, "epoch_length": 1, "n_rollout_steps": 4}
    overrides = {"runner.concurrency": 2, "seeding.env_base_seed": 1, "seeding.agent_base_seed": 1}
    given = (
        {"algorithm": own_project.GradientConfig(**small)},
        {"algorithm": {"_target_": "own_project.GradientConfig", **small}},
        {
            "overrides": {
                "algorithm._target_": "own_project.GradientConfig",
                **{f"algorithm.{key}": value for key, value in small.items()},
            }
        },
    )
    found = []
    for arguments in given:
        everything = {**arguments, "overrides": {**overrides, **arguments.get("overrides", {})}}
        with RunContext(env=lambda: GymMazeEnv("CartPole-v1"), silent=True, **everything) as run:
            run.train()
            assert type(run.runner.trainer) is own_project.Gradient
            found.append(str(run.runner.trainer.state_dict()))
    assert found[0] == found[1] == found[2]


def test_a_user_algorithm_has_its_configured_name(tmp_path):
    assert main([*TRAINING, "algorithm._target_=own_project.CarefulConfig", *SHORT]) == 0
    (run,) = (tmp_path / "outputs").iterdir()
    assert "-careful_gradient-" in run.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([TARGET, "~critic"], "model.critic: Gradient needs a model with a policy and a state critic, but no critic"),
        (
            [TARGET, "critic=flatten_concat_state_action"],
            "model.critic: Gradient needs a state critic, such as critic='flatten_concat_shared'",
        ),
        (
            ["algorithm._target_=own_project.QConfig", "critic=flatten_concat_shared"],
            "model.critic: SAC needs a state-action critic, such as critic='flatten_concat_state_action'",
        ),
        ([TARGET, "algorithm.gama=0.9"], "algorithm.gama"),
        ([TARGET, "algorithm.gamma=2"], "algorithm.gamma: expected a number of at least 0 and at most 1, found 2"),
        (
            [TARGET, "algorithm.n_epochs=many"],
            "algorithm.n_epochs: expected a whole number of at least 0, found 'many'",
        ),
        (["algorithm._target_=own_project.ReinforcConfig"], "own_project.ReinforcConfig"),
        (["algorithm._target_=own_project.Gradient"], "`own_project.Gradient` is not a subclass of AlgorithmConfig"),
        (["algorithm._target_=own_project.NamelessConfig"], "NamelessConfig has no trainer"),
    ],
)
def test_a_user_algorithm_raises_the_errors_of_the_built_in_ones(arguments, message, capfd):
    assert main([*TRAINING, *arguments]) != 0
    error = capfd.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_critic_of_the_wrong_kind_is_refused_when_a_run_context_trains(tmp_path):
    import own_project

    chosen = {"algorithm": own_project.GradientConfig(), "critic": "flatten_concat_state_action"}
    with (
        RunContext(lambda: GymMazeEnv("CartPole-v1"), str(tmp_path), silent=True, **chosen) as rc,
        pytest.raises(ConfigError, match="critic: Gradient needs a state critic, such as"),
    ):
        rc.train(n_epochs=1)


def test_its_trainer_receives_the_arguments_of_the_runner():
    import own_project

    run = RunContext(
        env=lambda: GymMazeEnv("CartPole-v1"),
        algorithm=own_project.CriticlessConfig(),
        runner="local",
        overrides={"runner.concurrency": 3},
        silent=True,
    )
    with pytest.raises(ValueError, match="built for Processes with 3"):
        run.train()
