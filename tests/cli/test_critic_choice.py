"""Default critics are of the kind that the algorithm needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from maze.api.run_context import RunContext
from maze.api.utils import RunMode
from maze.cli.checks import choose_critic
from maze.maze_cli import main
from tests.configs import composed

SHORT_SAC = ("algorithm.n_epochs=1", "algorithm.epoch_length=2", "algorithm.initial_buffer_size=70")


def configured(**arguments: Any) -> Any:
    rc = RunContext(env="CartPole-v1", silent=True, **arguments)
    return rc.config[RunMode.TRAINING]


@pytest.mark.parametrize(
    ("algorithm", "model", "composer", "has_networks"),
    [
        ("ppo", "flatten_concat", "SharedStateCriticComposer", True),
        ("ppo", "auto", "StateCriticComposer", False),
        ("ppo", "vector_obs", "SharedStateCriticComposer", True),
        ("sac", "flatten_concat", "StateActionCriticComposer", True),
        ("sac", "auto", "StateActionCriticComposer", False),
        ("sac", "vector_obs", "StateActionCriticComposer", False),
        ("sacfd", "flatten_concat", "StateActionCriticComposer", True),
        ("dqn", "flatten_concat", "StepStateCriticComposer", True),  # duelling heads value each sub-step
        ("dqn", "auto", "StateCriticComposer", False),
        ("es", "flatten_concat", "SharedStateCriticComposer", True),  # learns none, so any will do
    ],
)
def test_the_algorithm_chooses_the_critic(algorithm: str, model: str, composer: str, has_networks: bool) -> None:
    critic = configured(algorithm=algorithm, model=model).model.critic
    assert critic._target_.endswith(f".{composer}")
    assert ("networks" in critic) == has_networks


def test_an_experiment_whose_critic_does_not_suit_another_algorithm_gets_one_that_does() -> None:
    config = composed("conf_train", "+experiment=cartpole_ppo", "algorithm=sac")
    choose_critic(config)
    assert config.model.critic._target_.endswith("StateActionCriticComposer")


def test_a_command_needs_no_critic_and_its_directory_is_named_after_the_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["-cn", "conf_train", "env.name=Pendulum-v1", "algorithm=sac", *SHORT_SAC]) == 0
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == [
        "gym_env-flatten_concat-sac-flatten_concat_state_action-dev"
    ]
    command = ["-cn", "conf_train", "env.name=Pendulum-v1", "algorithm=sac", "critic=flatten_concat_shared"]
    capsys.readouterr()
    assert main(command) == 1
    assert "SAC needs a state-action critic" in capsys.readouterr().err
