"""A run of the command line that is killed for real, and resumed by another command."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from maze.console.runs import TrainingProgress
from maze.core.utils.checkpoint import load_state
from maze.maze_cli import main
from maze.utils.tensorboard_reader import read_event_file

COMMAND = (
    *("-cn", "conf_train", "env.name=CartPole-v1", "algorithm=ppo", "runner.concurrency=2", "algorithm.patience=0"),
    *("algorithm.epoch_length=2", "algorithm.n_rollout_steps=16", "algorithm.batch_size=8"),
    *("algorithm.rollout_evaluator.n_episodes=1", "algorithm.lr=0.01"),
)


def rewards(directory):
    """Mean rewards of training episodes by log step, from the TensorBoard file."""
    (file,) = Path(directory).glob("events.out.tfevents.*")
    return {
        event.step: value.simple_value
        for event in read_event_file(file).events
        for value in event.summary.value
        if value.tag == "train_BaseEnvEvents/reward/mean"
    }


def run(directory, *arguments):
    assert main([*COMMAND, f"hydra.run.dir={directory}", *arguments]) == 0
    return load_state(directory / "latest.pt")


@pytest.mark.long
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 143)])
def test_a_killed_command_resumes_to_the_result_of_an_uninterrupted_one(signum, status, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    first = tmp_path / "first"
    command = [sys.executable, "-m", "maze.maze_cli", *COMMAND, f"hydra.run.dir={first}", "algorithm.n_epochs=0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not (first / "latest.pt").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signum)
        assert process.wait(30) == status
    finally:
        process.kill()
        process.wait()
    stored = load_state(first / "latest.pt")
    n_epochs = stored["epoch"] + 3

    resumed = run(tmp_path / "second", f"input_dir={first}", "resume=true", f"algorithm.n_epochs={n_epochs}")
    seeds = [f"seeding.{name}={seed}" for name, seed in stored["seeds"].items()]
    expected = run(tmp_path / "third", f"algorithm.n_epochs={n_epochs}", *seeds)

    assert resumed["epoch"] == expected["epoch"] == n_epochs
    for part in ("model", "optimizer"):
        states = ({**state["parts"], "model": state["model"]}[part] for state in (resumed, expected))
        one, other = (list(tensors_of(state)) for state in states)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    found = rewards(tmp_path / "second")
    assert found
    assert min(found, default=stored["log_step"]) >= stored["log_step"]
    assert found.items() <= rewards(tmp_path / "third").items()


@pytest.mark.parametrize("runner", ["dev", "local"])
def test_a_signal_ends_an_evaluation_whose_episodes_have_no_end(runner, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    env = ("env._target_=tests.train.parallelization.toy_envs.counting_env", "+env.endings=[[1000000000,terminated]]")
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(
        TrainingProgress, "first_evaluation", lambda self, epoch: timer.start()
    )  # of the first evaluation
    command = [*COMMAND[:2], f"runner={runner}", *COMMAND[3:], *env, "hydra.run.dir=run"]
    assert main(command) == 143
    assert "Training was interrupted after epoch 0. Its state is saved" in capfd.readouterr().err
    assert (tmp_path / "run" / "latest.pt").is_file()


def tensors_of(state):
    for value in state.values():
        if isinstance(value, dict):
            yield from tensors_of(value)
        else:
            yield value


def test_resuming_without_a_directory_is_one_message(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main([*COMMAND, "resume=true"]) == 1
    error = capfd.readouterr().err
    assert error.startswith("ConfigError: resume: true resumes the run in `input_dir`")
