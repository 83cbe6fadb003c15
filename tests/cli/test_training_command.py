"""Training runs from the command line, and commands that use their directories."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from maze.cli.run_directory import WORTHLESS
from maze.maze_cli import main, maze_run
from maze.train.trainers.common.model_selection.best_model_selection import BestScore

TINY = (
    *("env.name=CartPole-v1", "algorithm=a2c", "runner.concurrency=2"),
    *("algorithm.n_epochs=1", "algorithm.epoch_length=1", "algorithm.n_rollout_steps=4"),
    *("algorithm.rollout_evaluator.n_episodes=2",),
)
ROLLOUT = ("env.name=CartPole-v1", "policy=torch_policy", "runner=sequential", "runner.n_episodes=1")


def train(*arguments: str) -> int:
    return main(["-cn", "conf_train", *TINY, *arguments])


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_training_run_leaves_the_documented_files(trained_run: Path) -> None:
    names = {path.relative_to(trained_run).as_posix() for path in trained_run.rglob("*") if path.is_file()}
    assert {"state_dict.pt", "latest.pt", "spaces_config.pkl", "hydra_config.yaml", "command.txt"} <= names
    assert {"versions.json", ".hydra/config.yaml", ".hydra/overrides.yaml"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)


def test_a_trained_policy_is_rolled_out_from_a_relative_directory(
    trained_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained_run, tmp_path / "run")
    assert main([*ROLLOUT, "input_dir=run"]) == 0
    output = capfd.readouterr().out
    assert output.count("total_episode_count") == 1


def test_a_deterministic_rollout_depends_on_the_environment_only(
    trained_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tables = []
    for agent_seed in (1, 2):
        seeds = ("seeding.env_base_seed=1", f"seeding.agent_base_seed={agent_seed}")
        assert main([*ROLLOUT, f"input_dir={trained_run}", "runner.deterministic=true", *seeds]) == 0
        tables.append([line for line in capfd.readouterr().out.splitlines() if "rollout_stats" in line])
    assert tables[0] == tables[1]


def test_maze_run_returns_the_best_score_of_a_training_run(capfd: pytest.CaptureFixture[str]) -> None:
    with initialize_config_module("maze.conf", version_base="1.3"):
        cfg = compose("conf_train", overrides=[*TINY, "verbose=2"])
    score = maze_run(cfg)
    assert score is not None
    assert f"-> new overall best model {score:.5f}!" in capfd.readouterr().out


def test_the_score_of_a_run_that_minimises_a_statistic_is_that_statistic(
    capfd: pytest.CaptureFixture[str],
) -> None:
    evaluator = "+algorithm.rollout_evaluator"
    criterion = (f"{evaluator}.objective=reward/max", f"{evaluator}.maximize=false")
    with initialize_config_module("maze.conf", version_base="1.3"):
        cfg = compose(
            "conf_train", overrides=[*TINY, "verbose=2", *criterion, f"{evaluator}.constraints=['reward <= 1']"]
        )
    score = maze_run(cfg)
    assert isinstance(score, BestScore)
    assert score > 1.0, "every step of CartPole pays 1"
    assert not score.maximize
    assert score.violation is not None
    assert score.violation > 0
    assert f"-> new overall best model {score:.5f}! (constraints are violated by" in capfd.readouterr().out


def test_the_description_of_a_run_shows_a_minimised_statistic_with_its_own_sign(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert train("+algorithm.rollout_evaluator.maximize=false", "hydra.run.dir=run") == 0
    capfd.readouterr()
    assert main(["--info", "run"]) == 0
    (score,) = re.findall(r"best score ([-\d.]+)", capfd.readouterr().out)
    assert float(score) > 1.0, "every step of CartPole pays 1"


def test_training_starts_from_an_earlier_run(trained_run: Path) -> None:
    assert train(f"input_dir={trained_run}", "algorithm.lr=0.0001") == 0


def test_two_runs_of_the_same_second_do_not_share_a_directory(tmp_path: Path) -> None:
    quick = ("env.name=CartPole-v1", "runner=sequential", "runner.n_episodes=1", "hydra.run.dir=same")
    assert main(quick) == main(quick) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["same", "same_02"]


def test_the_model_of_the_training_run_is_used_for_its_policy(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    shipped = Path(__file__).parents[2] / "maze" / "conf" / "model" / "flatten_concat.yaml"
    (tmp_path / "conf" / "model" / "small.yaml").write_text(shipped.read_text().replace("[64, 64]", "[8]"))
    assert train("-cd", "conf", "model=small", "hydra.run.dir=run") == 0
    assert main([*ROLLOUT, "input_dir=run"]) == 0
    assert "Using the model configuration of" in capfd.readouterr().out
    assert main([*ROLLOUT, "input_dir=run", "model=flatten_concat"]) == 1
    assert "CheckpointError" in capfd.readouterr().err


def test_a_stored_model_cannot_run_foreign_code(
    trained_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained_run, tmp_path / "run")
    config = OmegaConf.load(tmp_path / "run" / ".hydra" / "config.yaml")
    config.model.policy.networks[0]._target_ = "tensorboard.program.TensorBoard"
    OmegaConf.save(config, tmp_path / "run" / ".hydra" / "config.yaml")
    assert main([*ROLLOUT, "input_dir=run"]) == 1
    assert "names tensorboard.program.TensorBoard" in capfd.readouterr().err


ERRORS = [
    (["critic=~"], "ConfigError: model.critic", 1),
    (["critic=null"], "ConfigError: model.critic", 1),
    (["algorithm.device=cudaa"], "cudaa", 1),
    (["algorithm.device=cuda:99"], "algorithm.device: 'cuda:99'", 1),
    (["+algorithm.unknown=1"], "unknown", 1),
    (["algorithm.gamma=2"], "gamma", 1),
    (["env.name=CartPoll-v1"], "CartPole-v1", 1),
    (["runner.concurrency=-1"], "concurrency", 1),
]


@pytest.mark.parametrize(("arguments", "message", "status"), ERRORS, ids=str)
def test_a_run_that_cannot_start_reports_the_cause_and_leaves_no_files(
    arguments: list[str], message: str, status: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(*arguments) == status
    error = capfd.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["empty", "cut", "text"])
def test_a_broken_state_dict_is_named_and_no_files_are_left(
    damage: str, trained_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    whole = (run / "state_dict.pt").read_bytes()
    (run / "state_dict.pt").write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "text": b"<html>"}[damage])
    for command in ([*ROLLOUT, "input_dir=run"], ["-cn", "conf_train", *TINY, "input_dir=run"]):
        assert main(command) == 1
        error = capfd.readouterr().err
        assert any(line.startswith("CheckpointError: ") for line in error.splitlines())
        assert "state_dict.pt" in error
        assert str(run) in error
        assert "Traceback" not in error
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_critic_that_would_be_ignored_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    shipped = Path(__file__).parents[2] / "maze" / "conf"
    critic = OmegaConf.load(shipped / "critic" / "flatten_concat_step.yaml")
    model = OmegaConf.merge(OmegaConf.load(shipped / "model" / "flatten_concat.yaml"), {"critic": critic})
    OmegaConf.save(model, tmp_path / "conf" / "model" / "whole.yaml")
    whole = ("-cd", "conf", "model=whole")
    assert train(*whole, "critic=flatten_concat_shared") == 2
    assert "the chosen model has its own critic" in capfd.readouterr().err
    assert train(*whole, "hydra.run.dir=run") == 0


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interrupted_rollout_ends_at_once_with_the_status_of_its_signal(
    signum: signal.Signals, status: int, tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = ["env.name=CartPole-v1", "runner.n_processes=2", "runner.n_episodes=5000", "hydra.run.dir=run"]
    command = [sys.executable, "-m", "maze.maze_cli", *arguments]
    process = subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("run/trajectory_data/*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signum)
    assert process.wait(10) == status
    assert process.stderr is not None
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()


def test_model_files_are_not_removed_as_worthless() -> None:
    assert not [name for name in ("state_dict.pt", "latest.pt") if any(Path(name).match(p) for p in WORTHLESS)]


@pytest.mark.parametrize("model", ["auto", "flatten_concat", "vector_obs"])
def test_a_run_that_fails_after_its_model_was_built_leaves_no_directory(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = ["algorithm=bc", f"model={model}", "runner.dataset.input_data=nowhere"]
    assert main(["-cn", "conf_train", "env.name=CartPole-v1", *data, f"log_base_dir={tmp_path / 'outputs'}"]) == 1
    assert f"{Path.cwd() / 'nowhere'} does not exist" in capfd.readouterr().err
    assert not (tmp_path / "outputs").exists()
