"""Sweeps of real training runs, as documented, in separate processes."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import api_pb2, backend_context, get_experiment

from maze.maze_cli import main
from maze.utils.tensorboard_reader import tensorboard_to_pandas

TINY = (
    *("-cn", "conf_train", "env.name=CartPole-v1", "runner.concurrency=2", "algorithm.n_epochs=1"),
    *("algorithm.epoch_length=1", "algorithm.n_rollout_steps=4", "algorithm.rollout_evaluator.n_episodes=2"),
)


def sweep(directory: Path, *arguments: str) -> list[dict[str, str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "maze.maze_cli", *TINY, *arguments, "--multirun", "hydra.sweep.dir=sweep"]
    subprocess.run(command, check=True, env=environment, timeout=200, cwd=directory, stdout=subprocess.DEVNULL)
    with open(directory / "sweep" / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def hparams_tab(directory: Path) -> api_pb2.Experiment:
    """Return the HPARAMS tab of TensorBoard's own backend for a directory."""
    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(directory))
    multiplexer.Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(directory))
    context = backend_context.Context(base_plugin.TBContext(data_provider=provider))
    request = api_pb2.GetExperimentRequest(include_metrics=True)
    return get_experiment.Handler(RequestContext(), context, "", request).run()


@pytest.mark.long
def test_grid_search_over_three_learning_rates(tmp_path: Path) -> None:
    rates = ("0.0001", "0.0005", "0.001")
    rows = sweep(tmp_path, "algorithm=a2c", f"algorithm.lr={','.join(rates)}", "+experiment=grid_search", *TINY[3:4])
    assert sorted(row["algorithm.lr"] for row in rows) == sorted(rates)
    assert [float(row["objective"]) for row in rows] == sorted((float(row["objective"]) for row in rows), reverse=True)
    for row in rows:
        run = tmp_path / "sweep" / row["run_dir"]
        assert OmegaConf.load(run / "hydra_config.yaml").algorithm.lr == float(row["algorithm.lr"])
        assert (run / "state_dict.pt").is_file()
        best = tensorboard_to_pandas(run).loc["Results/best_reward"].value.iloc[-1]
        assert best == pytest.approx(float(row["objective"]), abs=1e-4)
    tab = hparams_tab(tmp_path)
    first, *others = [info.name for info in tab.hparam_infos if info.differs]
    assert first == "algorithm.lr"
    assert all(name.startswith("seeding.") for name in others)
    assert [info.name.tag for info in tab.metric_infos][:2] == ["Results/best_reward", "Results/final_reward"]


@pytest.mark.long
def test_the_documented_search_runs_two_trials_at_a_time(tmp_path: Path) -> None:
    optim = ("hydra.sweeper.optim.budget=3", "hydra.sweeper.optim.num_workers=2", "hydra.launcher.n_jobs=2")
    rows = sweep(tmp_path, "+experiment=nevergrad", "algorithm.batch_size=4", *optim)
    assert {row["status"] for row in rows} == {"completed"}
    assert len({row["algorithm.lr"] for row in rows}) == 3
    for row in rows:
        assert 0.00001 <= float(row["algorithm.lr"]) <= 0.001
        assert 0.0000025 <= float(row["algorithm.entropy_coef"]) <= 0.025
    assert (tmp_path / "sweep" / "optimization_results.yaml").is_file()


@pytest.mark.parametrize("experiment", ["grid_search", "nevergrad", "optuna"])
def test_experiments_choose_their_sweeper_and_launcher(experiment: str) -> None:
    with initialize_config_module("maze.conf", version_base="1.3"):
        config = compose("conf_train", overrides=[f"+experiment={experiment}"], return_hydra_config=True)
    choices = config.hydra.runtime.choices
    assert (choices["hydra/sweeper"], choices["hydra/launcher"]) == (
        experiment.replace("grid_search", "basic"),
        "local",
    )
    if experiment != "grid_search":
        assert set(config.hydra.sweeper.parametrization) == {"algorithm.lr", "algorithm.entropy_coef"}


DOCUMENTED = {
    "grid_search": {
        "defaults": [{"override /runner": "local"}, {"override /hydra/launcher": "local"}],
        "runner": {"concurrency": 0},
        "hydra": {"launcher": {"n_jobs": 4}},
    },
    "nevergrad": {
        "defaults": [
            {"override /algorithm": "ppo"},
            {"override /hydra/sweeper": "nevergrad"},
            {"override /hydra/launcher": "local"},
            {"override /runner": "local"},
        ],
        "runner": {"concurrency": 0},
        "hydra": {
            "sweeper": {
                "optim": {"optimizer": "OnePlusOne", "budget": 100, "num_workers": 4, "maximize": True},
                "parametrization": {
                    "algorithm.lr": {"lower": 0.00001, "upper": 0.001},
                    "algorithm.entropy_coef": {"lower": 0.0000025, "upper": 0.025},
                },
            }
        },
    },
}


@pytest.mark.parametrize("experiment", DOCUMENTED)
def test_the_shipped_templates_are_the_documented_ones(experiment: str) -> None:
    file = resources.files("maze.conf") / "experiment" / f"{experiment}.yaml"
    assert yaml.safe_load(file.read_text()) == DOCUMENTED[experiment]


def test_rollouts_are_compared_by_their_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rollout = (
        "env.name=CartPole-v1",
        "runner=sequential",
        "runner.n_episodes=1",
        "policy=random_policy,dummy_cartpole",
    )
    objective = "hydra.sweeper.objective=rollout_stats_BaseEnvEvents/reward/mean"
    assert main(["--multirun", *rollout, objective, "hydra.sweep.dir=sweep"]) == 0
    best = (tmp_path / "sweep" / "results.csv").read_text().splitlines()[1]
    assert best.startswith("1,dummy_cartpole,,200.0")


def test_cartpole_ppo_wrappers_normalises_observations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = ("+experiment=cartpole_ppo_wrappers", "algorithm.batch_size=4", "runner.normalization_samples=50")
    assert main([*TINY, *experiment, "hydra.run.dir=run"]) == 0
    config = OmegaConf.load("run/hydra_config.yaml")
    assert config.algorithm.lr == 0.0001
    assert Path("run/statistics.pkl").is_file()
    columns = {info.name for info in hparams_tab(Path("run")).hparam_infos}
    assert "wrappers.ObservationNormalizationWrapper.default_strategy" in columns
