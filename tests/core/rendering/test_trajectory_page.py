from __future__ import annotations

import base64
import json
import pickle
import re

import gymnasium
import numpy as np
import pytest

from maze.core.errors import ConfigError
from maze.core.rendering.renderer import RecordedFramesRenderer, step_picture
from maze.core.rendering.trajectory_page import main, text_of, write_trajectory_page
from maze.core.trajectory_recording.records.state_record import StateRecord
from maze.core.trajectory_recording.records.trajectory_record import (
    SpacesTrajectoryRecord,
    StateTrajectoryRecord,
    load_trajectory,
)
from maze.core.trajectory_recording.utils.trajectory_utils import SimpleTrajectoryRecordingSetup
from maze.core.trajectory_recording.writers.trajectory_writer_file import TrajectoryWriterFile
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.core.wrappers.trajectory_recording_wrapper import FrameRecordingWrapper, TrajectoryRecordingWrapper
from tests.core.rendering.episodes import CountRenderer, episode, is_png
from tests.train.parallelization.toy_envs import counting_env


def content(path):
    """The data of a page, and the page without it."""
    page = path.read_text(encoding="utf-8")
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1]), page.replace(found[1], "")


def test_a_player_page_contains_frames_rewards_actions_and_events_of_every_step(tmp_path):
    data, page = content(write_trajectory_page(episode(CountRenderer()), tmp_path / "page.html"))
    assert len(data["steps"]) == 4
    assert [step["reward"] for step in data["steps"]] == ["1", "2", "3", ""]
    assert [step["total"] for step in data["steps"]] == [1.0, 3.0, 6.0, 6.0]
    assert [step["outcome"] for step in data["steps"]] == ["", "", "terminated", ""]
    assert [step["action"] for step in data["steps"]] == ["move: 5", "move: 6", "move: 7", ""]
    assert data["steps"][0]["events"][1] == ["CutEvents.cut", "piece=a, size=4"]
    assert all(is_png(base64.b64decode(picture)) for picture in data["pictures"])
    assert len(data["pictures"]) == 4
    assert "Episode an episode" in page


def test_a_page_loads_no_external_resources(tmp_path):
    _, page = content(write_trajectory_page(episode(CountRenderer()), tmp_path / "page.html"))
    assert not re.search(r"(src|href)\s*=|https?://|@import|\$[A-Z_]+\b", page.replace('"picture").src = "data:', ""))


def test_text_of_the_episode_cannot_become_part_of_the_page(tmp_path):
    record = episode(CountRenderer())
    record.id = "</script><b>$DATA"
    record.step_records[0].maze_state["name"] = "</script><script>alert(1)</script>$TITLE"
    data, page = content(write_trajectory_page(record, tmp_path / "page.html"))
    assert data["steps"][0]["state"].endswith("</script><script>alert(1)</script>$TITLE")
    assert "<b>" not in page
    assert "alert(1)" not in page


@pytest.mark.parametrize(
    ("array", "shown"),
    [
        (np.arange(100), "array of shape (100,), int64, from 0 to 99"),
        (np.ones((9, 9), np.bool_), "array of shape (9, 9), bool, from 1 to 1"),
        (np.full(65, "steel"), "array of shape (65,), <U5"),
        (np.full(65, None), "array of shape (65,), object"),
        (np.zeros(65, "datetime64[s]"), "array of shape (65,), datetime64[s]"),
        (np.full(2, "steel"), "['steel', 'steel']"),
    ],
)
def test_arrays_of_any_type_in_a_state_are_shown(array, shown):
    assert text_of(array) == shown


@pytest.mark.parametrize("penalty", [-np.inf, np.nan])
def test_a_page_of_an_episode_with_an_infinite_reward_can_be_parsed(tmp_path, penalty):
    played = episode()
    played.step_records[1].reward = penalty
    found = re.search(
        '<script id="data".*?>(.*?)</script>', write_trajectory_page(played, tmp_path / "a.html").read_text()
    )
    steps = json.loads(found[1], parse_constant=pytest.fail)["steps"]  # browsers know no NaN and no Infinity
    first = played.step_records[0].reward
    assert [step["total"] for step in steps][:2] == [first, first]
    assert [step["total_text"] for step in steps][1] == str(penalty)


def test_equal_pictures_are_stored_once(tmp_path):
    class Constant(CountRenderer):
        def render(self, maze_state, maze_action, events, **kwargs):
            super().render({"count": 1}, None, events)

    data, _ = content(write_trajectory_page(episode(), tmp_path / "page.html", renderer=Constant()))
    assert [step["picture"] for step in data["steps"]] == [0, 0, 0, 0]
    assert len(data["pictures"]) == 1


def test_states_between_pictures_show_the_last_picture_before_them(tmp_path):
    data, _ = content(write_trajectory_page(episode(), tmp_path / "page.html", CountRenderer(), every_k_states=2))
    assert [step["picture"] for step in data["steps"]] == [0, 0, 1, 2], "the last one is never missing"


def test_a_picture_is_rendered_once_even_if_the_renderer_refreshes_a_window(monkeypatch):
    import matplotlib.figure

    n_drawn = []
    draw = matplotlib.figure.Figure.draw
    monkeypatch.setattr(matplotlib.figure.Figure, "draw", lambda *args: n_drawn.append(1) or draw(*args))
    assert is_png(step_picture(CountRenderer(), episode().step_records[0], dpi=50))
    assert len(n_drawn) == 1


def test_a_cut_off_episode_is_shown_as_truncated(tmp_path):
    record = episode(info={"TimeLimit.truncated": True})
    data, page = content(write_trajectory_page(record, tmp_path / "page.html"))
    assert data["steps"][2]["outcome"] == "truncated"
    assert data["pictures"] == []
    assert "FrameRecordingWrapper" in page


def test_trajectories_without_states_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="SpacesTrajectoryRecord"):
        write_trajectory_page(SpacesTrajectoryRecord("a"), tmp_path / "page.html")
    with pytest.raises(ConfigError, match="has no steps"):
        write_trajectory_page(StateTrajectoryRecord("a"), tmp_path / "page.html")


def recorded_file(directory, **kwargs):
    env = TimeLimitWrapper.wrap(GymMazeEnv("CartPole-v1"), max_episode_steps=6)
    env = TrajectoryRecordingWrapper.wrap(FrameRecordingWrapper.wrap(env, **kwargs))
    env.seed(1)
    with SimpleTrajectoryRecordingSetup(env, directory):
        for _ in range(2):
            env.reset()
            for step in range(6):
                env.step({"action": step % 2})
    return sorted(directory.glob("*.pkl"))


def test_frames_of_a_gymnasium_environment_can_be_viewed_from_the_stored_trajectory(tmp_path):
    first, second = (load_trajectory(file) for file in recorded_file(tmp_path))
    for trajectory in (first, second):
        assert isinstance(trajectory.renderer, RecordedFramesRenderer)
        assert sorted(trajectory.renderer.frames) == list(range(7))
    assert first.renderer.frames[6] != second.renderer.frames[6]
    frame = first.renderer.pixels(3)
    assert frame.shape == (400, 600, 3)
    assert frame.std() > 0
    data, _ = content(write_trajectory_page(first, tmp_path / "page.html"))
    assert base64.b64decode(data["pictures"][data["steps"][3]["picture"]]) == first.renderer.frames[3]


def test_a_frame_shows_the_state_that_its_record_holds(tmp_path):
    (trajectory, _) = (load_trajectory(file) for file in recorded_file(tmp_path))
    env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    env.reset()
    for index in (0, 2, 6):
        env.unwrapped.state = trajectory.step_records[index].maze_state
        np.testing.assert_array_equal(env.render(), trajectory.renderer.pixels(index))


def test_with_gaps_the_last_frame_before_is_shown(tmp_path):
    (trajectory, _) = (load_trajectory(file) for file in recorded_file(tmp_path, every_k_steps=4))
    renderer = trajectory.renderer
    assert sorted(renderer.frames) == [0, 4, 6]  # the end of the episode is never missing
    assert renderer.picture(3) == renderer.frames[0]
    assert renderer.picture(5) == renderer.frames[4]
    assert RecordedFramesRenderer().picture(0) is None


def test_recording_environment_continues_after_pickling_and_cloning():
    env = FrameRecordingWrapper.wrap(GymMazeEnv("CartPole-v1", render_mode="rgb_array"))
    env.seed(1)
    env.reset()
    env.step({"action": 1})
    copy = pickle.loads(pickle.dumps(env))
    assert copy.get_renderer().frames == env.get_renderer().frames
    clone = FrameRecordingWrapper.wrap(GymMazeEnv("CartPole-v1"))
    clone.reset()
    clone.clone_from(env)
    clone.step({"action": 0})
    assert sorted(clone.get_renderer().frames) == [0, 1, 2]
    assert sorted(env.get_renderer().frames) == [0, 1]


def test_environments_with_a_renderer_of_their_own_need_no_frames():
    with pytest.raises(ConfigError, match="needs no frames"):
        FrameRecordingWrapper(counting_env(((3, "terminated"),)))


class OwnState:
    def __init__(self):
        self.level = 3


def test_a_type_that_the_command_does_not_know_is_named_with_the_way_to_allow_it(tmp_path, capsys):
    trajectory = StateTrajectoryRecord("own")
    trajectory.append(StateRecord(OwnState(), {"move": 1}, None, 1.0, True, {}, {}))
    TrajectoryWriterFile(tmp_path).write(trajectory)
    file = tmp_path / "own.pkl"
    assert main([str(file)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"CheckpointError: .*contains the type `{__name__}.OwnState`.*\(`--allow <type>`\)", line)
    assert main([str(file), "--allow", f"{__name__}.OwnState"]) == 0
    assert main([str(tmp_path / "nowhere.pkl")]) == 1
    assert "nowhere.pkl: cannot be read" in capsys.readouterr().err


def test_the_page_is_written_from_the_command_line(tmp_path, capsys):
    file = recorded_file(tmp_path)[0]
    assert main([str(file)]) == 0
    assert capsys.readouterr().out.strip() == str(file.with_suffix(".html"))
    assert len(content(file.with_suffix(".html"))[0]["steps"]) == 7
