"""Films of episodes, and which episode is shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from maze.maze_cli import main
from tests.report.test_inspection import steps_of


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def inspect(*arguments: str, env: str = "env.name=CartPole-v1") -> int:
    return main(["-cn", "conf_inspect", env, "policies=[random]", "hydra.run.dir=shown", *arguments])


def test_a_gif_shows_each_state_for_the_same_time() -> None:
    """Equal pictures that follow each other are stored once, and shown for longer."""
    image: Any = pytest.importorskip("PIL.Image")
    assert inspect("runner.max_episode_steps=5", "runner.video=film.gif", "runner.frames_per_second=10") == 0
    durations = []
    with image.open("shown/film.gif") as film:
        for frame in range(film.n_frames):
            film.seek(frame)
            durations.append(film.info["duration"])
    assert sum(durations) == 100 * len(steps_of(Path("shown/episode.html"))) == 600


def test_an_mp4_can_be_read_again() -> None:
    """Pictures of a Maze renderer, which may have any size."""
    ffmpeg: Any = pytest.importorskip("imageio_ffmpeg")
    wrappers = "wrappers=tutorial_cutting_2d"
    arguments = ("runner.max_episode_steps=3", f"runner.video={Path('film.mp4').absolute()}")
    assert inspect(wrappers, *arguments, env="env=tutorial_cutting_2d_struct_masked") == 0
    n_frames, _ = ffmpeg.count_frames_and_secs("film.mp4")
    assert n_frames == 4
    assert all(size % 2 == 0 for size in next(ffmpeg.read_frames("film.mp4"))["size"])


SEEDS = ("seeding.env_base_seed=3", "seeding.agent_base_seed=4")


@pytest.fixture(scope="module")
def returns(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Returns of five episodes, which a comparison has measured, in ascending order."""
    directory = tmp_path_factory.mktemp("compared") / "run"
    compared = ("policies=[random]", "runner.n_episodes=5", f"hydra.run.dir={directory}", *SEEDS)
    assert main(["-cn", "conf_compare", "env.name=CartPole-v1", *compared]) == 0
    lines = (directory / "episodes.csv").read_text(encoding="utf-8").splitlines()
    return sorted(float(line.split(",")[5]) for line in lines[1:])


@pytest.mark.parametrize(("choice", "position"), [("worst", 0), ("median", 2), ("best", 4)])
def test_the_episode_is_chosen_by_its_return(
    choice: str, position: int, returns: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect(*SEEDS, "runner.n_episodes=5", f"runner.choose={choice}") == 0
    said = re.search(rf"The {choice} of 5 episodes has a return of (\d+)", capsys.readouterr().out)
    assert said is not None
    assert steps_of(Path("shown/episode.html"))[-1]["total"] == float(said[1])
    assert float(said[1]) == returns[position]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runner.video=film.avi"], "ends in .mp4 or .gif, found film.avi"),
        (["runner.choose=longest"], "runner.choose: expected best, worst, median"),
    ],
)
def test_arguments_that_show_no_episode_are_reported(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect(*arguments) == 1
    assert message in capsys.readouterr().err


def test_play_requires_the_name_of_the_video_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--play", "outputs/run", "--video"]) == 2
    assert "--play: argument --video: expected one argument. usage: maze-run --play" in capsys.readouterr().err
