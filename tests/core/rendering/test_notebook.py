from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from maze.core.log_events.episode_event_log import EpisodeEventLog
from maze.core.log_events.log_events_writer_tsv import LogEventsWriterTSV
from maze.core.rendering.notebook_event_logs_viewer import NotebookEventLogsViewer
from maze.core.rendering.notebook_trajectory_viewer import NotebookTrajectoryViewer
from maze.core.rendering.renderer_args import IntRangeArg, OptionsArrayArg
from tests.core.rendering.episodes import CountRenderer, cut_events, episode, is_png

NOTEBOOK = Path(__file__).resolve().parents[3] / "evaluation" / "viewer.ipynb"


@pytest.fixture
def shown(monkeypatch):
    """What the viewers display, instead of displaying it."""
    pytest.importorskip("ipywidgets")
    widgets = []
    for module in ("notebook_trajectory_viewer", "notebook_event_logs_viewer"):
        monkeypatch.setattr(f"maze.core.rendering.{module}.show", widgets.append)
    return widgets


def descendants(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from descendants(child)


def by_description(widget, description):
    (found,) = [w for w in descendants(widget) if getattr(w, "description", None) == description]
    return found


def test_the_slider_moves_through_the_episode(shown):
    viewer = NotebookTrajectoryViewer(episode(renderer=CountRenderer()))
    viewer.build()
    slider = by_description(shown[0], "step")
    assert (slider.min, slider.max) == (0, 3)
    first, first_text = viewer.picture.value, viewer.text.value
    slider.value = 2
    assert is_png(first)
    assert is_png(viewer.picture.value)
    assert viewer.picture.value != first
    assert "terminated" in viewer.text.value
    assert "terminated" not in first_text
    assert "cut(size=1)" not in first_text
    assert "CutEvents.cut" in first_text


class ChoosyRenderer(CountRenderer):
    drawn = []

    @staticmethod
    def arguments():
        return [OptionsArrayArg("colour", "Colour", ["red", "blue"]), IntRangeArg("width", "Width", 1, 5)]

    def render(self, maze_state, maze_action, events, colour="", width=0):
        self.drawn.append((maze_state["count"], colour, width))
        super().render(maze_state, maze_action, events)


def test_the_arguments_of_the_renderer_become_menus(shown):
    ChoosyRenderer.drawn.clear()
    NotebookTrajectoryViewer(episode(renderer=ChoosyRenderer())).build()
    by_description(shown[0], "Colour").value = "blue"
    by_description(shown[0], "Width").value = 4
    by_description(shown[0], "step").value = 1
    assert ChoosyRenderer.drawn == [(0, "red", 1), (0, "blue", 1), (0, "blue", 4), (1, "blue", 4)]


def test_an_episode_without_a_renderer_is_shown_in_words_with_the_way_to_pictures(shown):
    viewer = NotebookTrajectoryViewer(episode(renderer=None))
    viewer.build()
    assert viewer.picture.layout.display == "none"
    assert "FrameRecordingWrapper" in viewer.text.value


def write_logs(directory):
    for name in ("a", "b"):
        log = EpisodeEventLog(name)
        log.step_event_logs = cut_events()
        LogEventsWriterTSV(directory).write(log)


def test_the_event_viewer_offers_the_attributes_of_the_chosen_event(shown, tmp_path):
    write_logs(tmp_path)
    viewer = NotebookEventLogsViewer(tmp_path)
    viewer.build()
    assert [label for label, _ in viewer.event.options] == ["BaseEnvEvents.reward", "CutEvents.cut"]
    assert viewer.metric.value == "value"
    first = viewer.picture.value
    viewer.event.value = tmp_path / "CutEvents.cut.tsv"
    assert viewer.metric.options == ("piece", "size")
    viewer.group_by.value = "piece"
    assert is_png(viewer.picture.value)
    assert viewer.picture.value != first


def test_an_attribute_that_cannot_be_plotted_is_explained_and_the_menus_stay_usable(shown, tmp_path):
    write_logs(tmp_path)
    viewer = NotebookEventLogsViewer(tmp_path)
    viewer.build()
    viewer.event.value = tmp_path / "CutEvents.cut.tsv"
    viewer.metric.value = "piece"
    assert "cannot be drawn" in viewer.message.value
    viewer.metric.value = "size"
    assert viewer.message.value == ""


def test_without_the_extra_the_error_names_it():
    code = (
        "import sys; sys.modules['ipywidgets'] = None\n"
        "from maze.core.rendering.notebook_trajectory_viewer import NotebookTrajectoryViewer\n"
        "from maze.core.trajectory_recording.records.trajectory_record import StateTrajectoryRecord\n"
        "from maze.core.trajectory_recording.records.state_record import StateRecord\n"
        "record = StateTrajectoryRecord('a'); record.append(StateRecord(1, None, None, None, None, None, {}))\n"
        "try: NotebookTrajectoryViewer(record)\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'pip install "maze-rl[notebook]>=1"' in done.stdout


@pytest.mark.slow
def test_the_notebook_runs_and_its_widgets_show_pictures(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("ipywidgets")
    # In a process of its own: the kernel's event loop warns about what is none of our business.
    script = (
        "import sys, json, nbformat, nbclient\n"
        "notebook = nbformat.read(sys.argv[1], as_version=4)\n"
        "nbclient.NotebookClient(notebook, timeout=120, kernel_name='python3').execute()\n"
        "nbformat.write(notebook, 'executed.ipynb')\n"
        "state = notebook.metadata.widgets['application/vnd.jupyter.widget-state+json']['state']\n"
        "widgets = [w for w in state.values() if w['model_name'] == 'ImageModel']\n"
        "images = [buffer['data'] for widget in widgets for buffer in widget.get('buffers', [])]\n"
        "print(json.dumps(images))\n"
    )
    assert nbclient is not None
    done = subprocess.run(
        [sys.executable, "-c", script, str(NOTEBOOK)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(NOTEBOOK.parents[1])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    images = [base64.b64decode(data) for data in json.loads(done.stdout)]
    assert len(images) == 2
    assert all(is_png(image) for image in images)
