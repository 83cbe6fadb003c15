"""``maze-run --info``: the description of runs and other directories, and the commands that it prints."""

from __future__ import annotations

import re
import shlex
import shutil
import zipfile
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from maze.cli.commands import play_command
from maze.cli.run_summary import run_commands
from maze.maze_cli import main

TINY = (
    *("+experiment=cartpole_ppo", "runner.concurrency=2", "algorithm.n_epochs=2", "algorithm.epoch_length=1"),
    *("algorithm.n_rollout_steps=4", "algorithm.batch_size=4", "algorithm.rollout_evaluator.n_episodes=1"),
)
SEEDS = ("seeding.env_base_seed=3", "seeding.agent_base_seed=4")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a training run and a rollout."""
    directory = tmp_path_factory.mktemp("runs")
    assert main(["-cn", "conf_train", *TINY, *SEEDS, f"hydra.run.dir={directory}/trained"]) == 0
    rollout = ["env.name=CartPole-v1", "runner=sequential", "runner.n_episodes=2", "runner.max_episode_steps=5"]
    assert main([*rollout, f"hydra.run.dir={directory}/rolled_out"]) == 0
    return directory


@pytest.fixture
def copy(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of these runs, in the current directory."""
    shutil.copytree(runs, tmp_path / "outputs")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "outputs"


def info(directory: Path | str, capfd: pytest.CaptureFixture[str], status: int = 0) -> str:
    capfd.readouterr()
    assert main(["--info", str(directory)]) == status
    captured = capfd.readouterr()
    assert "Traceback" not in captured.err
    return captured.out or captured.err


def test_a_training_run_is_described_with_its_components_progress_and_files(
    copy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = info(copy / "trained", capfd)
    rows = dict(re.findall(r"^  (\w[\w ]*?)  +(.*)$", text, re.MULTILINE))
    assert rows["run"] == "CartPole-v1, ppo"
    assert rows["command"].startswith("maze-run -cn conf_train +experiment=cartpole_ppo")
    assert rows["env"] == "gym_env"
    assert rows["algorithm"] == "ppo"
    assert rows["seeds"] == "env 3, agent 4"
    assert re.fullmatch(r"ended, 2 epochs, 16 environment steps; best score [\d.]+", rows["state"])
    assert "torch" in rows["versions"]
    for name in ("state_dict.pt", "latest.pt", "spaces_config.pkl", "hydra_config.yaml", "events.out.tfevents"):
        assert re.search(rf"^  {re.escape(name)}\S*\s.*: valid$", text, re.MULTILINE), name


def commands(text: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("    maze-run ")]


def test_the_printed_commands_work(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, _, compare, _, resume = commands(info(copy / "trained", capfd))
    assert "input_dir=outputs/trained" in resume
    assert main([*resume, "hydra.run.dir=resumed"]) == 0
    assert main([*compare, "runner.n_episodes=2", "runner.max_episode_steps=5", "hydra.run.dir=compared"]) == 0
    assert "ended, 4 epochs" in info("resumed", capfd)


@pytest.mark.parametrize("name", ["trained", "a copy (lr=0.1), 2"])
def test_commands_for_a_run_can_name_any_directory(name: str, tmp_path: Path) -> None:
    run = tmp_path / name
    run.mkdir()
    (run / "hydra_config.yaml").write_text("algorithm: {}\n")
    (run / "command.txt").write_text("maze-run -cn conf_train algorithm=ppo\n")
    assert "Resume it" not in run_commands(run, tmp_path), "as after runs of RLlib, which cannot be resumed"
    (run / "latest.pt").touch()
    resume = shlex.split(run_commands(run, tmp_path)["Resume it"])
    for command in (resume, play_command([name])):
        (override,) = OverridesParser.create().parse_overrides([text for text in command if "input_dir=" in text])
        assert override.value() == name


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
        content[content.index(archive.read(largest)) + largest.file_size // 2] ^= 0xFF
    path.write_bytes(content)


def test_a_flipped_byte_is_found_and_usable_files_are_named(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = copy / "trained"
    damage(run / "latest.pt")
    text = info(run, capfd, status=1)
    assert re.search(r"latest\.pt .*DAMAGED", text)
    assert "resume=true" not in text
    assert "maze-run --play" in text, "the best model can still act"


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("state_dict.pt", lambda path: path.write_bytes(b"")),
        ("state_dict.pt", lambda path: path.write_bytes(path.read_bytes()[:900])),
        ("state_dict.pt", lambda path: path.write_text("<html>not found</html>")),
        ("spaces_config.pkl", lambda path: path.write_bytes(path.read_bytes()[:100])),
        ("state_dict.pt", lambda path: path.unlink()),
    ],
    ids=["empty", "cut off", "a web page", "cut off spaces", "missing"],
)
def test_without_weights_or_spaces_no_command_for_the_policy_is_printed(
    name: str, how: object, copy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = copy / "trained" / name
    assert callable(how)
    how(path)
    text = info(copy / "trained", capfd, status=int(path.exists()))
    assert "maze-run --play" not in text


def test_damaged_logs_configurations_and_versions_are_reported(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = copy / "trained"
    (events,) = run.glob("events.out.tfevents.*")
    events.write_bytes(events.read_bytes()[:-7])
    (run / "versions.json").write_text("{")
    text = info(run, capfd, status=1)
    assert re.search(r"events\.out.*DAMAGED: \d+ events can be read, the next one cannot", text)
    assert re.search(r"versions\.json .*DAMAGED", text)
    for name in ("hydra_config.yaml", ".hydra/config.yaml"):
        (run / name).write_text("a: [1")
    text = info(run, capfd, status=1)
    assert re.search(r"hydra_config\.yaml .*DAMAGED: it cannot be read", text)
    assert re.search(r"settings +it cannot be read", text)


def test_a_rollout_is_described_and_a_cut_off_trajectory_found(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = copy / "rolled_out"
    text = info(run, capfd)
    assert len(re.findall(r"trajectory_data/.*\.pkl .*: valid", text)) == 2
    assert re.search(r"runner +sequential", text)
    trajectory = sorted((run / "trajectory_data").iterdir())[0]
    trajectory.write_bytes(trajectory.read_bytes()[:-60])
    assert re.search(rf"{trajectory.name} .*DAMAGED", info(run, capfd, status=1))


def test_another_directory_is_refused(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for path in ("outputs/traind", "outputs", copy / "trained" / "latest.pt"):
        assert f"{path} is not the directory of a run" in info(path, capfd, status=2)


def test_the_file_of_an_interrupted_write_is_listed(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (copy / "trained" / ".maze-unfinished-latest.pt-abc").write_bytes(b"half")
    assert "left by an interrupted write" in info(copy / "trained", capfd)
