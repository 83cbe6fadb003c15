"""A console that takes nothing more ends no run: a closed pipe, a full disk, closed descriptors."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from maze.console.streams import LastingStream, lasting_console
from maze.core.utils.checkpoint import load_state
from maze.maze_cli import main

SEEDS = ("seeding.env_base_seed=1", "seeding.agent_base_seed=1")
TRAINING = (
    *("-cn", "conf_train", "env.name=CartPole-v1", "algorithm=a2c", "algorithm.n_epochs=2", "algorithm.epoch_length=1"),
    *("algorithm.n_rollout_steps=4", "algorithm.rollout_evaluator.n_episodes=2", "runner.concurrency=2", *SEEDS),
)
ROLLOUT = ("env.name=CartPole-v1", "runner.n_episodes=3", "runner.max_episode_steps=5", *SEEDS)
COMMANDS = (
    (*TRAINING, "hydra.run.dir=training"),
    (*TRAINING, "hydra.run.dir=training_in_processes", "runner=local"),
    (*ROLLOUT, "hydra.run.dir=rollout", "runner=sequential"),
    (*ROLLOUT, "hydra.run.dir=rollout_in_processes", "runner=parallel", "runner.n_processes=2"),
    (*ROLLOUT, "hydra.sweep.dir=sweep", "runner=sequential", "-m", "runner.deterministic=true,false"),
)
RUN = """
import ast, sys
from maze.maze_cli import main
sys.exit(max([main(command) for command in ast.literal_eval(sys.argv[1])]))
"""
TALKATIVE = """
import sys
import numpy as np
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv

def talkative():
    env = GymMazeEnv("CartPole-v1")
    step = env.step
    env.step = lambda action: (print("step", flush=True), step(action))[1]
    return env

env = SubprocVectorEnv([talkative] * 2, n_workers=1)
env.seed([1, 2])
env.reset()
for _ in range(3):
    env.step({"action": np.zeros(2, int)})
env.close()
print("done", file=sys.stderr)
"""
REDIRECTIONS = {
    "full": "exec >/dev/full 2>/dev/full",
    "head": "exec 1> >(head -n 1 > head.txt)",
    "closed": "exec >&- 2>&-",
}


def files(directory: Path) -> list[str]:
    """Names of the files that a command leaves, without numbers of times and processes."""
    names = [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]
    return sorted("events.out.tfevents" if "tfevents" in name else name for name in names if name != "head.txt")


def of_command(directory: Path, command: int) -> Path:
    """Where a command leaves its files."""
    (place,) = (argument for argument in COMMANDS[command] if argument.startswith(("hydra.run.dir", "hydra.sweep.dir")))
    return directory / place.partition("=")[2]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all commands leave where there is a console."""
    directory = tmp_path_factory.mktemp("expected")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert [main(command) for command in COMMANDS] == [0] * len(COMMANDS)
    return directory


@pytest.mark.long
@pytest.mark.parametrize("redirection", REDIRECTIONS.values(), ids=REDIRECTIONS)
def test_runs_continue_without_a_console(redirection: str, expected: Path, tmp_path: Path) -> None:
    line = ["bash", "-c", f'{redirection}\nexec "$@"', "bash", sys.executable, "-c", RUN, repr(COMMANDS)]
    found = subprocess.run(line, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=200)
    assert (found.returncode, found.stderr) == (0, "")
    for command in range(len(COMMANDS)):
        assert files(of_command(tmp_path, command)) == files(of_command(expected, command))
    checkpoints = [file.relative_to(expected) for file in expected.rglob("latest.pt")]
    assert len(checkpoints) == 2
    for checkpoint in checkpoints:
        weights = load_state(expected / checkpoint)["model"]
        assert to_bytes(load_state(tmp_path / checkpoint)["model"]) == to_bytes(weights)


def to_bytes(weights: Any) -> Any:
    if isinstance(weights, torch.Tensor):
        return weights.numpy().tobytes()
    return {key: to_bytes(value) for key, value in weights.items()}


def test_output_of_environments_in_worker_processes_is_harmless(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TALKATIVE]
    with open("/dev/full", "w") as full:
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (found.returncode, found.stderr) == (0, "done\n")


def test_the_console_is_the_same_before_and_after(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with lasting_console():
        assert isinstance(sys.stdout, LastingStream)
        print("one")
        with lasting_console():
            print("two")
        assert isinstance(sys.stdout, LastingStream)
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr().out == "one\ntwo\n"


def test_console_replaced_during_a_run_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    other = io.StringIO()
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    with lasting_console():
        sys.stdout = other
    assert sys.stdout is other


def test_letters_that_a_console_does_not_know_become_question_marks() -> None:
    target = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print("μ = 1", file=LastingStream(target), flush=True)
    assert target.buffer.getvalue() == b"? = 1\n"
