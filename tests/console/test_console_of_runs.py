"""Console output of commands: which figures are shown for which epoch, with and without a terminal."""

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

from maze.core.log_stats.stats_format import significant
from maze.maze_cli import main
from maze.report.progress import read_progress

TRAINING = (
    *("-cn", "conf_train", "env.name=CartPole-v1", "algorithm=a2c", "runner.concurrency=2"),
    *("algorithm.epoch_length=2", "algorithm.n_rollout_steps=40", "algorithm.rollout_evaluator.n_episodes=2"),
)
SHORT = (*TRAINING, "algorithm.n_epochs=2", "console.interval=0", "hydra.run.dir=run")
TABLE_ROW = re.compile(r"^ +\d+\|(train|eval) ", re.MULTILINE)


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shown_by_epoch(said: str) -> dict[int, dict[str, str]]:
    """The mean returns that the console shows for each epoch, by prefix."""
    found = {}
    for block in re.split(r"^(?=epoch )", said, flags=re.MULTILINE)[1:]:
        head, columns, row, *_ = block.splitlines()
        cells = [cell.partition(" ")[0] for cell in re.split(r"\s{2,}", row.strip())]
        assert cells[0] == "return"
        shown = zip(columns.split(), cells[1:], strict=True)
        found[int(re.findall(r"\d+", head)[0])] = {path: cell for path, cell in shown if cell != "-"}
    return found


def logged(directory: Path) -> dict[tuple[str, int], float]:
    """The mean returns in `progress.csv`, by prefix and log step."""
    return {
        (path, step): values["BaseEnvEvents/reward/mean"]
        for path, step, _, _, values in read_progress(directory).rows()
        if "BaseEnvEvents/reward/mean" in values
    }


def test_one_row_needs_no_list_and_a_wrong_interval_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*TRAINING, "algorithm.n_epochs=1", "console.rows=return", "console.interval=often"]) == 1
    assert "console.interval: expected seconds, or a time such as 50ms" in capfd.readouterr().err
    assert main([*TRAINING, "algorithm.n_epochs=1", "console.rows=return", "console.interval=1min"]) == 0
    said = capfd.readouterr().out
    shown = re.findall(r"^  (\w[\w/ ]*?)  ", said.partition("Trained 1 epoch")[0], re.MULTILINE)
    assert {*shown} == {"return", "environment steps/s", "time"}


@pytest.mark.parametrize("interval", [0, 1000])
def test_an_epoch_is_shown_with_the_evaluation_of_its_final_policy(
    interval: int, capfd: pytest.CaptureFixture[str]
) -> None:
    n_epochs = 3
    arguments = (*TRAINING, f"algorithm.n_epochs={n_epochs}", f"console.interval={interval}", "hydra.run.dir=run")
    assert main(arguments) == 0
    said = capfd.readouterr().out
    # Evaluations are logged in the log step of the epoch that follows them.
    returns = logged(Path("run"))
    expected = {0: {"eval": significant(returns["eval", 1])}}
    for epoch in range(1, n_epochs + 1):
        train, evaluation = returns["train", epoch], returns["eval", epoch + 1]
        expected[epoch] = {"train": significant(train), "eval": significant(evaluation)}
    shown = shown_by_epoch(said)
    assert shown == {epoch: expected[epoch] for epoch in (range(n_epochs + 1) if interval == 0 else (0, 1, n_epochs))}
    best = re.findall(r"^epoch .*best (\S+?)(?:,|$)", said, re.MULTILINE)
    best_so_far = [max(returns["eval", step] for step in range(1, epoch + 2)) for epoch in shown]
    assert best == [significant(value) for value in best_so_far]


def test_a_run_prints_its_directory_and_next_commands(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(SHORT) == 0
    said = capfd.readouterr().out
    lines = said.splitlines()
    assert "-> writing into run" in lines
    returns = logged(Path("run"))
    best = max(value for (path, _), value in returns.items() if path == "eval")
    assert "2 epochs, 320 environment steps in " in said
    assert f"best score {significant(best)}." in said
    assert "Results are in run." in lines
    commands = [line.strip() for line in lines if line.startswith("  maze-run ")]
    assert commands[0] == "maze-run --play run"
    assert {"maze-run -cn conf_compare 'policies=[random,run]'", "maze-run --info run"} <= set(commands)
    assert any(command.endswith("input_dir=run resume=true algorithm.n_epochs=4") for command in commands)
    log = Path("run/maze_cli.log").read_text(encoding="utf-8")
    assert len(TABLE_ROW.findall(log)) > 40, "the documented table, of all epochs"


def test_verbose_2_prints_the_configuration_and_every_statistic(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "verbose=2"]) == 0
    said = capfd.readouterr().out
    assert "n_rollout_steps: 40" in said
    assert len(TABLE_ROW.findall(said)) > 40
    assert not re.search(r"^epoch ", said, re.MULTILINE)


@pytest.mark.parametrize("way", ["--quiet", "verbose=0"])
def test_verbosity_0_prints_errors_only(way: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, way]) == 0
    assert capfd.readouterr() == ("", "")
    assert len(TABLE_ROW.findall(Path("run/maze_cli.log").read_text(encoding="utf-8"))) > 40
    assert main(["env.name=CartPol-v1", "runner=sequential", way]) == 1
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "Did you mean" in printed.err or "CartPol" in printed.err


def test_an_unknown_verbosity_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
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

    def drawn(self) -> list[str]:
        """Everything that was drawn in a line, the contents of live lines one after the other."""
        text = re.sub(r"\x1b\[\??[0-9;]*[a-zA-Z]", "", self.output.decode())
        return [part for line in text.split("\n") for part in line.split("\r")]

    def screen(self) -> list[str]:
        """The lines as they stand when all was written; a line that was written over has its last content."""
        text = re.sub(r"\x1b\[\??[0-9;]*[a-zA-Z]", "", re.sub(r"\n\x1b\[\?25h\r\x1b\[1A", "", self.output.decode()))
        return [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_on_a_terminal_there_are_a_live_line_and_a_table_for_each_epoch(columns: int) -> None:
    terminal = Terminal(columns, *SHORT, TERM="xterm")
    assert terminal.status() == 0
    assert any(line.startswith("epoch ") and "environment steps/s" in line for line in terminal.drawn())
    heads = [index for index, line in enumerate(terminal.screen()) if line.startswith("epoch ")]
    assert [terminal.screen()[head].split("/")[0] for head in heads] == ["epoch 0", "epoch 1", "epoch 2"]
    table = terminal.screen()[heads[1] : heads[2]]
    assert table[1].split() == ["train", "eval"]
    assert [line.strip().split("  ")[0] for line in table[2:4]] == ["return", "episode length"]
    assert 6 <= len(table) - 2 <= 10
    live = [line for line in terminal.drawn() if line.startswith("epoch ")]
    assert max(len(line) for line in [*live, *table]) <= columns


@pytest.mark.slow
def test_ctrl_c_saves_the_run_and_prints_how_to_resume() -> None:
    terminal = Terminal(100, *TRAINING, "algorithm.n_epochs=2000", "hydra.run.dir=run")
    terminal.read_until(rb"epoch 1\D.*environment steps/s")
    terminal.interrupt()
    assert terminal.status() == 128 + signal.SIGINT
    screen = terminal.screen()
    assert "Results are in run." in screen
    assert any(line.startswith("Interrupted after ") for line in screen)
    assert any(line.endswith("input_dir=run resume=true") for line in screen)
    assert Path("run/latest.pt").is_file()


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
