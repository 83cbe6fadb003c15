from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.backend_bases import KeyEvent

from maze.core.errors import ConfigError
from maze.core.log_events.episode_event_log import EpisodeEventLog
from maze.core.rendering.events_stats_renderer import EventStatsRenderer
from maze.core.rendering.keyboard_controlled_trajectory_viewer import KeyboardControlledTrajectoryViewer
from maze.core.rendering.renderer import offscreen, step_picture
from maze.core.rendering.step_stats_renderer import StepStatsRenderer
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from tests.core.rendering.episodes import CountRenderer, cut_events, episode, is_png


@pytest.fixture(autouse=True)
def _closed_figures():
    plt.switch_backend("agg")
    yield
    plt.close("all")


@pytest.fixture
def log():
    log = EpisodeEventLog("one")
    log.step_event_logs = cut_events()
    return log


def drawn_lines():
    """What is drawn in the current axes, by label."""
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in plt.gca().get_lines()}


def test_event_statistics_add_the_reward_up_by_default(log):
    EventStatsRenderer().render_current_episode_stats(log)
    ((steps, values),) = drawn_lines().values()
    assert steps == [0, 1, 2]
    assert values == [1.0, 3.0, 6.0]
    assert plt.gca().get_title() == "BaseEnvEvents.reward"
    assert plt.gca().get_ylabel() == "cumsum(value)"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"_child0": ([0, 2], [5, 7])}),  # several values of a step are summed up
        ({"aggregation_func": "max", "post_processing_func": None}, {"_child0": ([0, 2], [4, 2])}),
        ({"aggregation_func": np.mean, "post_processing_func": None}, {"_child0": ([0, 2], [2.5, 2])}),
        ({"group_by": "piece"}, {"a": ([0, 2], [4, 6]), "b": ([0], [1])}),
        ({"post_processing_func": lambda series: -series}, {"_child0": ([0, 2], [-5, -2])}),
    ],
)
def test_event_statistics_join_group_and_process_as_configured(log, arguments, expected):
    EventStatsRenderer().render_current_episode_stats(log, "CutEvents.cut", metric_name="size", **arguments)
    assert drawn_lines() == expected


def test_several_episodes_are_plotted_as_mean_and_range():
    df = pd.DataFrame({"episode_id": ["a", "a", "b", "b"], "env_time": [0, 1, 0, 1], "value": [1.0, 1.0, 3.0, 5.0]})
    EventStatsRenderer.render_timeline_stat(df)
    assert drawn_lines() == {"_child0": ([0, 1], [2.0, 5.0])}
    (band,) = plt.gca().collections
    assert band.get_paths()[0].get_extents().get_points()[:, 1].tolist() == [1.0, 8.0]
    assert "mean and range of 2 episodes" in plt.gca().get_title()


def test_the_step_renderer_plots_single_values_or_their_sum(log):
    StepStatsRenderer.render_stats(log, cumulative=False)
    assert drawn_lines() == {"_child0": ([0, 1, 2], [1.0, 2.0, 3.0])}
    StepStatsRenderer.render_stats(log, "CutEvents.cut", group_by="piece", aggregation_func="sum", metric="size")
    assert drawn_lines() == {"a": ([0, 2], [4, 6]), "b": ([0], [1])}


def test_unknown_events_attributes_and_functions_are_named_with_those_that_there_are(log):
    renderer = EventStatsRenderer()
    with pytest.raises(ConfigError, match=r"no event `A.b`.*BaseEnvEvents.reward, CutEvents.cut"):
        renderer.render_current_episode_stats(log, "A.b")
    with pytest.raises(ConfigError, match="no attribute `weight`; it has: piece, size"):
        renderer.render_current_episode_stats(log, "CutEvents.cut", metric_name="weight")
    with pytest.raises(
        ConfigError, match=r"post_processing_func: .*`cumsun`.*Did you mean `cumsum`\?.*cumprod, cummax"
    ):
        renderer.render_current_episode_stats(log, post_processing_func="cumsun")
    with pytest.raises(ConfigError, match=r"aggregation_func: .*`maximum`.*Did you mean `max`\?.*sum, mean, median"):
        renderer.render_current_episode_stats(log, aggregation_func="maximum")


def test_closing_closes_the_renderers_own_figure_only(log):
    plt.figure("mine")
    renderer = EventStatsRenderer()
    renderer.render_current_episode_stats(log)
    renderer.close()
    assert plt.get_figlabels() == ["mine"]


def test_the_statistics_wrapper_plots_its_current_episode():
    env = LogStatsWrapper.wrap(GymMazeEnv("CartPole-v1"))
    env.seed(1)
    env.get_episode_event_log()
    env.reset()
    for action in (0, 1, 0):
        env.step({"action": action})
    env.render_stats()
    assert drawn_lines() == {"_child0": ([0, 1, 2], [1.0, 2.0, 3.0])}


def test_pictures_are_rendered_without_changing_the_users_figures():
    mine = plt.figure("Counting")  # the name of the renderer's own
    png = step_picture(CountRenderer(), episode().step_records[0])
    assert is_png(png)
    assert plt.get_fignums() == [mine.number]
    assert not mine.axes
    with offscreen():
        plt.figure("Counting")
        plt.show()
        assert plt.get_figlabels() == ["Counting"]
    assert plt.gcf() is mine


class SilentRenderer(CountRenderer):
    def render(self, maze_state, maze_action, events, **kwargs):
        """Draws nothing."""


def test_a_renderer_without_output_gives_no_frame():
    plt.figure("mine")
    assert step_picture(SilentRenderer(), episode().step_records[0]) is None


@pytest.fixture
def viewer(monkeypatch):
    """A viewer on a backend that is taken for one with windows; pauses and windows are left out."""
    monkeypatch.setattr("maze.core.rendering.keyboard_controlled_trajectory_viewer.window_backends", lambda: {"agg"})
    monkeypatch.setattr(plt, "pause", lambda seconds: None)
    monkeypatch.setattr(plt, "show", lambda block: None)
    return KeyboardControlledTrajectoryViewer(episode(), CountRenderer(), initial_step_index=1)


def press(key):
    canvas = plt.gcf().canvas
    canvas.callbacks.process("key_press_event", KeyEvent("key_press_event", canvas, key))


def test_keys_move_through_the_episode_and_stop_at_its_ends(viewer, capsys):
    viewer.render()
    titles = [plt.gca().get_title()]
    for key in ("right", "right", "right", "left", "home", "left", "up", "x"):
        press(key)
        titles.append(plt.gca().get_title())
    assert titles == ["move 6", "move 7", "end", "end", "move 7", "move 5", "move 5", "end", "end"]
    assert "left/right" in capsys.readouterr().out
    press("q")
    assert plt.get_fignums() == []


def test_a_negative_index_counts_from_the_end():
    assert KeyboardControlledTrajectoryViewer(episode(), CountRenderer(), initial_step_index=-1).step_index == 3


def test_where_no_window_can_be_opened_the_alternatives_are_named():
    with pytest.raises(ConfigError, match=r"`agg`.*write_trajectory_page"):
        KeyboardControlledTrajectoryViewer(episode(), CountRenderer()).render()
