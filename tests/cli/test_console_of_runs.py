"""What commands print: with a terminal and without one, a little, everything, and nothing."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import struct
import sys
import time
from pathlib import Path

import pytest

from maze.maze_cli import main

TRAINING = (
    *("-cn", "conf_train", "env.name=CartPole-v1", "algorithm=a2c", "runner.concurrency=2"),
    *("algorithm.epoch_length=2", "algorithm.n_rollout_steps=40", "algorithm.rollout_evaluator.n_episodes=2"),
)
SHORT = (*TRAINING, "algorithm.n_epochs=2", "console.interval=0", "hydra.run.dir=run")
TABLE_ROW = re.compile(r"^ +\d+\|(train|eval) ", re.MULTILINE)


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_training_says_where_it_writes_what_it_reached_and_what_comes_next(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(SHORT) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "-> writing into run"
    (first, last) = [line for line in lines if line.startswith("epoch ")]
    assert re.match(
        r"epoch 1/2: return [\d.]+ ± [\d.]+ \(eval [\d.]+ ± [\d.]+\), [\d,]+ environment steps/s, 160 ", first
    )
    assert last.startswith("epoch 2/2: return ")
    end = lines.index("Everything is in run:")
    assert re.match(r"Trained 2 epochs, 320 environment steps in .* s; best score [\d.]+\.$", lines[end - 1])
    assert all(name in lines[end + 1] for name in ("report.html", "state_dict.pt", "progress.csv", "maze_cli.log"))
    commands = [line.strip() for line in lines[end + 2 :] if line.startswith("  maze-run ")]
    assert commands[:2] == ["maze-run --play run", "maze-run -cn conf_compare 'policies=[random,run]'"]
    assert commands[2].endswith("input_dir=run resume=true algorithm.n_epochs=4")
    log = Path("run/maze_cli.log").read_text(encoding="utf-8")
    assert len(TABLE_ROW.findall(log)) > 40, "the documented table, of all epochs"


def test_everything_is_the_configuration_and_every_statistic(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "verbose=2"]) == 0
    said = capfd.readouterr().out
    assert "n_rollout_steps: 40" in said
    assert len(TABLE_ROW.findall(said)) > 40
    assert "-> new overall best model" in said
    assert "Update epoch - 2" in said


def test_everything_has_the_documented_headers_of_evolution_strategies(capfd: pytest.CaptureFixture[str]) -> None:
    es = ("algorithm=es", "algorithm.n_epochs=1", "algorithm.n_rollouts_per_update=2", "runner.n_eval_rollouts=1")
    for verbosity, wanted in (
        (2, ["Init Shared Noise Table", "Trainer Setup", "Run Trainer", "Iteration 0", "Iteration 1"]),
        (1, []),
    ):
        command = ("-cn", "conf_train", "env.name=CartPole-v1", *es, "runner.shared_noise_table_size=100000")
        assert main([*command, f"verbose={verbosity}"]) == 0
        lines = capfd.readouterr().out.splitlines()
        assert [line.strip("* ") for line in lines if line.startswith("**********")] == wanted


@pytest.mark.parametrize("way", ["--quiet", "verbose=0"])
def test_quiet_is_nothing_but_errors(way: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, way]) == 0
    assert capfd.readouterr() == ("", "")
    assert len(TABLE_ROW.findall(Path("run/maze_cli.log").read_text(encoding="utf-8"))) > 40
    assert main(["env.name=CartPol-v1", way]) == 1
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "Did you mean" in printed.err or "CartPol" in printed.err


def test_a_verbosity_that_there_is_not_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "verbose=3"]) == 1
    assert "verbose: expected 0" in capfd.readouterr().err


class Terminal:
    """A command in a pseudo terminal.

    :param columns: Its width.
    """

    def __init__(self, columns: int, *arguments: str, **environment: str) -> None:
        command = [sys.executable, "-m", "maze.maze_cli", *arguments]
        self.output = b""
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            os.environ.update(environment, COLUMNS="", LINES="")
            os.environ.pop("COLUMNS")
            os.execv(command[0], command)
        import fcntl
        import termios

        fcntl.ioctl(self._file, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def read_until(self, pattern: bytes, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.output):
            assert time.monotonic() < deadline, self.output[-2000:]
            if select.select([self._file], [], [], 0.2)[0]:
                try:
                    self.output += os.read(self._file, 65536)
                except OSError:  # it has ended
                    break

    def interrupt(self) -> None:
        os.write(self._file, b"\x03")

    def status(self) -> int:
        self.read_until(b"(?!)")
        os.close(self._file)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def screen(self) -> list[str]:
        """The lines as they stand when all was written; a line that was written over has its last content."""
        text = re.sub(r"\x1b\[[0-9;]*m", "", self.output.decode())
        return [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "no_color"), [(80, "1"), (120, "")])
def test_on_a_terminal_there_are_a_live_line_and_a_table(columns: int, no_color: str) -> None:
    terminal = Terminal(columns, *SHORT, NO_COLOR=no_color, TERM="xterm")
    assert terminal.status() == 0
    live = re.findall(r"\repoch \d/2 +(\d+)%\|[█▏▎▍▌▋▊▉ ]{10}\| ([^\r\n]*)", terminal.output.decode())
    assert any("environment steps/s" in text for _, text in live), live
    assert all(len(line) <= columns for line in terminal.screen() if line.startswith(("epoch", "  ret")))
    heads = [index for index, line in enumerate(terminal.screen()) if line.startswith("epoch ")]
    assert len(heads) == 2
    table = terminal.screen()[heads[0] + 1 : heads[1]]
    assert [line.split("  ")[1].strip() for line in table[1:3]] == ["return", "episode length"]
    assert 6 <= len(table) - 1 <= 10
    assert (b"\x1b[1m" in terminal.output) == (not no_color)


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on() -> None:
    terminal = Terminal(100, *TRAINING, "algorithm.n_epochs=2000", "hydra.run.dir=run")
    terminal.read_until(rb"\repoch 1\D.*environment steps/s")
    terminal.interrupt()
    assert terminal.status() == 128 + signal.SIGINT
    screen = terminal.screen()
    assert "Everything is in run:" in screen
    assert any(line.startswith("Interrupted after ") for line in screen)
    assert any(line.endswith("input_dir=run resume=true") for line in screen)
    assert Path("run/latest.pt").is_file()
