"""`maze-run --runs`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from maze.api.run_context import RunContext
from maze.maze_cli import main
from maze.train.utils.run_process import RECORD_FILE
from tests.api.shorter import SHORTER


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(run_dir: str, algorithm: str, env: str) -> RunContext:
    rc = RunContext(run_dir=run_dir, algorithm=algorithm, env=env, overrides=SHORTER[algorithm], silent=True)
    rc.train(n_epochs=2)
    return rc


def test_training_runs_are_listed_with_their_state(capsys: pytest.CaptureFixture[str]) -> None:
    first = train("outputs/a/1", "ppo", "CartPole-v1")
    train("outputs/a/2", "a2c", "Acrobot-v1")
    first.rollout(n_episodes=1, max_episode_steps=3, record_trajectory=False, record_event_logs=False)
    # checkpoints are not read, so that damaged ones do not matter
    Path("outputs/a/1/latest.pt").write_bytes(b"")
    record = Path("outputs/a/2") / RECORD_FILE
    record.write_text(record.read_text(encoding="utf-8").replace('"ended"', '"interrupted"'), encoding="utf-8")
    capsys.readouterr()
    assert main(["--runs"]) == 0
    head, one, two = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["run", "environment", "algorithm", "steps"]
    score = f"{first.results.best_score:.5g}"
    assert one.split()[:6] == ["outputs/a/1", "CartPole-v1", "ppo", "16", score, "ended"]
    assert two.split()[:4] == ["outputs/a/2", "Acrobot-v1", "a2c", "16"]
    assert "interrupted" in two
    assert main(["--info", "outputs/a/2"]) == 0
    assert "interrupted, 2 epochs, 16 environment steps" in capsys.readouterr().out


def test_a_directory_without_training_runs_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--runs", str(tmp_path)]) == 0
    assert "No training runs in" in capsys.readouterr().out
    assert main(["--runs=nowhere"]) == 2
    assert "--runs: nowhere is not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--runs", "--info"])
def test_a_second_directory_is_refused(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag, "nowhere", str(tmp_path)]) == 2
    assert f"{flag}: expected one directory, found 2: nowhere, {tmp_path}" in capsys.readouterr().err


def test_a_list_of_runs_needs_no_torch() -> None:
    code = "import sys; from maze.maze_cli import main; main(['--runs', '.']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
