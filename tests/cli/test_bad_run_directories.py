"""Invalid run directories and configurations: one message with place and cause, and no files left."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from maze.maze_cli import main

TINY = (
    *("env.name=CartPole-v1", "algorithm=a2c", "runner.concurrency=2"),
    *("algorithm.n_epochs=1", "algorithm.epoch_length=1", "algorithm.n_rollout_steps=4"),
    *("algorithm.rollout_evaluator.n_episodes=1",),
)
ROLLOUT = ("env.name=CartPole-v1", "policy=torch_policy", "runner=sequential", "runner.n_episodes=1", "input_dir=run")
TRAIN = ("-cn", "conf_train", *TINY, "input_dir=run")
RESUME = (*TRAIN, "resume=true")


@pytest.fixture
def run(trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a training run, in the current directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained_run, tmp_path / "run")
    return tmp_path / "run"


class Bomb:
    """Leaves a trace where it is unpickled without care."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("exploded"),)  # type: ignore[return-value]


def remove(name: str) -> Callable[[Path], object]:
    return lambda run: (run / name).unlink()


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda run: (run / name).write_bytes(content)


def cut(name: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_bytes((run / name).read_bytes()[:-40])


def _size(entry: zipfile.ZipInfo) -> int:
    return entry.file_size


def flip(name: str) -> Callable[[Path], object]:
    def change(run: Path) -> None:
        content = bytearray((run / name).read_bytes())
        with zipfile.ZipFile(run / name) as archive:
            weights = max((entry for entry in archive.infolist() if "/data/" in entry.filename), key=_size)
            content[content.index(archive.read(weights)) + weights.file_size // 2] ^= 0x10
        (run / name).write_bytes(content)

    return change


def store(name: str, value: object) -> Callable[[Path], object]:
    return lambda run: torch.save(value, run / name)


def another_model(run: Path) -> None:
    config = run / ".hydra" / "config.yaml"
    config.write_text(config.read_text().replace("- 64\n", "- 32\n"))


FAULTS: list[tuple[str, Callable[[Path], object], tuple[str, ...], list[str]]] = [
    ("no such directory", shutil.rmtree, ROLLOUT, ["run is not a directory", "Train first: maze-run -cn conf_train"]),
    ("no weights", remove("state_dict.pt"), ROLLOUT, ["there is no state_dict.pt in it"]),
    ("no spaces", remove("spaces_config.pkl"), ROLLOUT, ["spaces_config.pkl"]),
    ("spaces cut off", cut("spaces_config.pkl"), ROLLOUT, ["spaces_config.pkl", "not a file of spaces"]),
    (
        "spaces with code",
        lambda run: (run / "spaces_config.pkl").write_bytes(pickle.dumps(Bomb())),
        ROLLOUT,
        ["spaces_config.pkl"],
    ),
    ("weights with code", store("state_dict.pt", {"model": Bomb()}), ROLLOUT, ["state_dict.pt", "nothing in it"]),
    ("a flipped byte", flip("state_dict.pt"), ROLLOUT, ["state_dict.pt", "damaged"]),
    ("a flipped byte", flip("latest.pt"), RESUME, ["latest.pt", "damaged"]),
    ("no training state", remove("latest.pt"), RESUME, ["latest.pt"]),
    ("weights in its place", store("latest.pt", {"a": torch.ones(1)}), RESUME, ["found weights alone"]),
    ("a tensor instead", store("state_dict.pt", torch.ones(1)), ROLLOUT, ["state_dict.pt", "expected a state dict"]),
    ("configuration is not YAML", write(".hydra/config.yaml", b"model: [1"), ROLLOUT, [".hydra/config.yaml"]),
    ("configuration is not a text", write(".hydra/config.yaml", b"\xff\xfe\x00\x81"), ROLLOUT, [".hydra/config.yaml"]),
    ("another model", another_model, ROLLOUT, ["state_dict.pt", "(32, 4)", "(64, 4)"]),
]


@pytest.mark.parametrize(
    ("fault", "command", "messages"),
    [row[1:] for row in FAULTS],
    ids=[f"{name}: {'resume' if 'resume=true' in command else command[0]}" for name, _, command, _ in FAULTS],
)
def test_an_unusable_run_is_named_with_the_found_and_expected_content(
    fault: Callable[[Path], object],
    command: tuple[str, ...],
    messages: list[str],
    run: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fault(run)
    before = sorted(path.name for path in run.parent.iterdir())
    assert main(list(command)) in (1, 2)
    error = capfd.readouterr().err
    assert "Traceback" not in error
    for message in ("run", *messages):
        assert message in error
    assert sorted(path.name for path in run.parent.iterdir()) == before, "something is left, or code was run"


CONFIGURATIONS = [
    ("algorithm: {lrr: 0.1}", "algorithm", "lrr", "lr"),
    ("algorithm: {rollout_evaluator: {n_episode: 3}}", "rollout_evaluator", "n_episode", "n_episodes"),
    ("algorithm: {rollout_evaluator: {objectve: reward}}", "rollout_evaluator", "objectve", "objective"),
    ("runner: {concurency: 3}", "runner", "concurency", "concurrency"),
    ("env: {_target_: maze.core.wrappers.maze_gym_env_wrapper.GymMaceEnv}", "env", "GymMaceEnv", "GymMazeEnv"),
    ("env: {_target_: collections.OrderedDict}", "env", "collections.OrderedDict", "Maze or gymnasium environment"),
    ("env: {_target_: subprocess.check_output}", "env", "subprocess.check_output", "refused"),
    ("runner: {_target_: maze.core.agent.random_policy.RandomPolicy}", "runner", "RandomPolicy", "Runner"),
    (
        "model: {policy: {_target_: maze.perception.models.policies.ProbabilisticPolicyCompose}}",
        "model.policy",
        "ProbabilisticPolicyCompose",
        "ProbabilisticPolicyComposer",
    ),
]


@pytest.mark.parametrize(("text", "where", "found", "expected"), CONFIGURATIONS, ids=[c[0] for c in CONFIGURATIONS])
def test_mistakes_in_configuration_files_are_named_with_their_place_and_a_suggestion(
    text: str,
    where: str,
    found: str,
    expected: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}\n")
    assert main(["-cd", "conf", "-cn", "conf_train", "+experiment=mine", *TINY]) in (1, 2)
    error = capfd.readouterr().err
    assert "Traceback" not in error
    for message in (where, found, expected):
        assert message in error
    assert [path.name for path in tmp_path.iterdir()] == ["conf"]


def test_a_run_directory_is_not_made_where_a_file_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "outputs").write_text("not a directory")
    command = ["env.name=CartPole-v1", "runner=sequential", "runner.n_episodes=1", f"log_base_dir={tmp_path}/outputs"]
    assert main(command) == 1
    error = capfd.readouterr().err
    assert f"{tmp_path}/outputs" in error
    assert "log_base_dir=" in error


def test_an_invalid_constraint_stops_the_run_before_it_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    evaluator = '+algorithm.rollout_evaluator.constraints=["kpi/waste =< 1"]'
    assert main(["-cn", "conf_train", *TINY, evaluator]) == 1
    assert "cannot read 'kpi/waste =< 1'" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_objective_that_does_not_exist_is_found_at_the_first_evaluation(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["-cn", "conf_train", *TINY, "+algorithm.rollout_evaluator.objective=rewrd"]) == 1
    error = capfd.readouterr().err
    assert "no statistic or KPI 'rewrd'. Known: " in error
    assert "BaseEnvEvents/reward/mean" in error
