"""The configuration of runs with RLlib; nothing here needs Ray."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from maze.cli.checks import complete
from maze.core.errors import ConfigError
from maze.maze_cli import main
from maze.rllib.algorithms import ALGORITHMS, TuneParameters, find_algorithm, require_ray
from maze.rllib.maze_rllib_runner import MazeRLlibRunner

CONF = Path(__file__).resolve().parents[2] / "maze" / "conf" / "rllib" / "algorithm"


def composed(*overrides: str):
    with initialize_config_module("maze.conf", version_base="1.3"):
        return compose("conf_rllib", overrides=list(overrides))


@pytest.mark.parametrize("option", sorted(name.lower() for name in ALGORITHMS))
def test_every_option_composes_with_the_documented_overrides(option: str) -> None:
    overrides = ["algorithm.config.rollout_fragment_length=50"]
    if option != "sac":  # it has three learning rates
        overrides.append("algorithm.config.lr=0.001")
    cfg = composed("env.name=CartPole-v0", f"rllib/algorithm={option}", *overrides)
    assert cfg.algorithm.algorithm.lower() == option
    assert cfg.algorithm.config.rollout_fragment_length == 50
    assert cfg.runner._target_ == "maze.rllib.maze_rllib_runner.MazeRLlibRunner"


def test_every_algorithm_has_an_option() -> None:
    assert {name.lower() for name in ALGORITHMS} == {path.stem for path in CONF.glob("*.yaml")}


def test_a_misspelt_algorithm_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="Did you mean `IMPALA`"):
        find_algorithm("impalla")


def test_the_command_with_a3c_names_the_available_algorithms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["-cn", "conf_rllib", "env.name=CartPole-v0", "rllib/algorithm=a3c", "algorithm.config.lr=0.001"]) == 2
    message = capfd.readouterr().err
    assert "there is no such option" in message
    assert all(option in message for option in ("ppo", "appo", "impala", "dqn", "sac"))
    assert not list(tmp_path.iterdir())


def test_a_missing_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "ray" or name.startswith("ray.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'pip install "maze-rl\[rllib\]>=1"'):
        require_ray()


def test_neither_maze_nor_the_runner_imports_ray() -> None:
    code = "import maze, maze.maze_cli, maze.rllib.maze_rllib_runner, sys; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_runner_takes_the_documented_arguments_in_their_order() -> None:
    documented = [
        "spaces_config_dump_file",
        "normalization_samples",
        "num_workers",
        "tune_config",
        "ray_config",
        "state_dict_dump_file",
    ]
    assert list(inspect.signature(MazeRLlibRunner).parameters)[: len(documented)] == documented
    runner = MazeRLlibRunner("spaces.pkl", 100, 2, {"stop": {}}, {"num_cpus": 1}, "state.pt")
    assert runner.tune_params == {"stop": {}}
    assert runner.ray_config == {"num_cpus": 1}
    assert "tune_params" in {field.name for field in dataclasses.fields(runner)}


def test_a_negative_number_of_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"runner\.num_workers"):
        MazeRLlibRunner("spaces.pkl", 100, -1, {}, {}, "state.pt")


def test_the_dev_runner_has_one_worker_and_logs_more() -> None:
    runner = composed("rllib/runner=dev").runner
    assert (runner.num_workers, runner.num_learners, runner.log_level) == (1, 0, "INFO")


def test_rllibs_own_model_gets_no_critic_of_maze() -> None:
    cfg = composed("model=rllib", "model.fcnet_hiddens=[128,128]", "model.vf_share_layers=False")
    complete(cfg, Path.cwd())
    assert list(cfg.model.fcnet_hiddens) == [128, 128]
    assert cfg.model.vf_share_layers is False
    assert "critic" not in cfg.model


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"stopp": {}}, "Did you mean `runner.tune_config.stop`"),
        ({"stop": {"training_iteration": "many"}}, r"runner\.tune_config\.stop\.training_iteration"),
        ({"checkpoint_freq": -1}, r"runner\.tune_config\.checkpoint_freq"),
    ],
)
def test_a_wrong_tune_config_names_its_key(config: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TuneParameters.from_config(config)


def test_training_stops_at_the_first_condition_that_holds() -> None:
    parameters = TuneParameters.from_config(
        {"stop": {"training_iteration": 10, "episode_return_mean": 195, "env_runners/x": 3, "time_total_s": None}}
    )
    result = {"env_runners": {"episode_return_mean": 100.0, "x": 1}}
    assert parameters.reason_to_stop(result, 9) == ""
    assert "training_iteration" in parameters.reason_to_stop(result, 10)
    result["env_runners"]["episode_return_mean"] = 195.0
    assert "episode_return_mean" in parameters.reason_to_stop(result, 1)


def test_a_condition_that_rllib_does_not_report_is_an_error() -> None:
    parameters = TuneParameters.from_config({"stop": {"time_totl_s": 3}})
    with pytest.raises(ConfigError, match="Did you mean `time_total_s`"):
        parameters.reason_to_stop({"time_total_s": 1.0}, 1)
