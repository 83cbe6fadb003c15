"""Recorded episodes as a self-contained HTML player and as a video."""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maze.core.annotations import override
from maze.core.env.base_env import is_truncated
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError, MazeError, optional_package
from maze.core.rendering.renderer import Renderer, step_picture
from maze.core.trajectory_recording.records.state_record import StateRecord
from maze.core.trajectory_recording.records.trajectory_record import StateTrajectoryRecord, load_trajectory
from maze.core.trajectory_recording.writers.trajectory_writer import TrajectoryWriter
from maze.core.utils.files import file_stem, write_whole

NO_PICTURE = (
    "No picture: this trajectory has no renderer. Record gymnasium environments with a FrameRecordingWrapper, or "
    "give the environment a renderer."
)


_LONGEST = 400
_DEFAULT_REPR: Any = object.__repr__


class StepSummary(NamedTuple):
    """Textual summary of a step.

    :param time: Environment time.
    :param actor: The actor, if the simulation has several; otherwise empty.
    :param state: The state.
    :param action: The action of the simulation.
    :param reward: Reward of the step; None for the last state.
    :param total: Sum of the rewards up to and including this step.
    :param outcome: "terminated" or "truncated" for the step that ended the episode, otherwise empty.
    :param events: Pairs of an event's name and its attributes.
    """

    time: str
    actor: str
    state: str
    action: str
    reward: float | None
    total: float
    outcome: str
    events: list[tuple[str, str]]


def step_summaries(episode_record: StateTrajectoryRecord) -> list[StepSummary]:
    """Return a summary of each step of an episode."""
    summaries: list[StepSummary] = []
    total = 0.0
    for index, record in enumerate(episode_record.step_records):
        reward = None if record.reward is None else float(np.sum(record.reward))
        total += reward or 0.0
        time = str(index if record.env_time is None else record.env_time)
        action = "" if record.maze_action is None else text_of(record.maze_action)
        state, actor = text_of(record.maze_state), actor_text(record.actor_id)
        summaries.append(StepSummary(time, actor, state, action, reward, total, _outcome(record), _events(record)))
    return summaries


def actor_text(actor: ActorID | None) -> str:
    """Return the text of an actor; empty if there is only one."""
    return "" if actor is None else f"sub-step {actor.step_key}, agent {actor.agent_id}"


def text_of(value: Any) -> str:
    """Return a value as short text; objects with the default `repr` by their attributes."""
    if isinstance(value, np.ndarray) and value.size > 64:
        values = f", from {value.min():.4g} to {value.max():.4g}" if value.dtype.kind in "biuf" else ""
        text = f"array of shape {value.shape}, {value.dtype}{values}"
    elif isinstance(value, np.ndarray):
        text = np.array2string(value, precision=4, separator=", ")
    elif isinstance(value, dict):
        text = ", ".join(f"{key}: {text_of(entry)}" for key, entry in value.items())
    elif isinstance(value, (float, np.floating)):
        text = f"{value:.6g}"
    elif type(value).__repr__ is _DEFAULT_REPR and hasattr(value, "__dict__"):
        text = f"{type(value).__name__}({text_of(vars(value))})"
    else:
        text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _outcome(record: StateRecord) -> str:
    if not record.done:
        return ""
    return "truncated" if is_truncated(record.done, record.info or {}) else "terminated"


def _events(record: StateRecord) -> list[tuple[str, str]]:
    if record.step_event_log is None:
        return []
    return [
        (event.qualified_name, ", ".join(f"{name}={text_of(value)}" for name, value in event.attributes.items()))
        for event in record.step_event_log.events
    ]


class OtherFuture(NamedTuple):
    """Episode with the same beginning as another one, shown side by side with it.

    :param episode: The episode.
    :param names: Names of the two episodes.
    :param step: Environment step in which they differ first.
    :param substep: Sub-step of this step.
    :param summary: Rows of a name, a number of each episode, and their difference, as texts.
    :param note: Note about the two episodes.
    """

    episode: StateTrajectoryRecord
    names: tuple[str, str]
    step: int
    substep: int
    summary: Sequence[tuple[str, str, str, str]]
    note: str


def write_trajectory_page(
    trajectory: StateTrajectoryRecord | str | Path,
    path: str | Path,
    renderer: Renderer | None = None,
    title: str | None = None,
    decisions: Sequence[Sequence[Mapping[str, Any]]] | None = None,
    other: OtherFuture | None = None,
    every_k_states: int = 1,
) -> Path:
    """Write an HTML player of an episode: pictures, actions, rewards and events, with slider and keyboard.

    If the simulation has sub-steps, each of them is shown. The page is self-contained.

    :param trajectory: The episode, or its file (loaded safely, see `load_trajectory`).
    :param path: The page to write.
    :param renderer: Renderer of the steps; `None`: the one stored with the trajectory.
    :param title: Title of the page; `None`: the episode's id.
    :param decisions: The decisions of each step as plain values, see `maze.evaluation.inspection`; `None`: unknown.
    :param other: Another future of the episode, shown side by side with it; `None`: there is none.
    :param every_k_states: Draw every k-th state, and the last one; other states are shown with the last picture before
        them. Drawing with matplotlib takes about 0.1 s per picture.
    """
    episode = _episode(trajectory)
    pictures: dict[str, int] = {}

    def stored(png: bytes) -> int:
        # Equal pictures are stored once.
        return pictures.setdefault(base64.b64encode(png).decode(), len(pictures))

    def draw(shown: StateTrajectoryRecord, record: StateRecord) -> bytes | None:
        chosen = renderer if renderer is not None else shown.renderer
        return None if chosen is None else step_picture(chosen, record, dpi=80)

    content: dict[str, Any] = {"steps": _shown_steps(episode, draw, stored, decisions or (), (), every_k_states)}
    if other is not None:
        n_common = sum(len(record.by_substep()) for record in episode.step_records[: other.step])
        ahead = _shown_steps(other.episode, draw, stored, (), content["steps"][:n_common], every_k_states)
        content["steps"], content["other"] = _side_by_side([content["steps"], ahead], [episode, other.episode])
        n_shown = len(episode.step_records[other.step].by_substep())
        start = n_common + min(other.substep, n_shown - 1)
        content |= {"names": other.names, "start": start, "summary": other.summary, "note": other.note}
    # A "</script>" in a text would end the data.
    data = json.dumps({**content, "pictures": list(pictures)}, ensure_ascii=False, allow_nan=False).replace(
        "<", "\\u003c"
    )
    template = resources.files("maze.core.rendering").joinpath("trajectory_page.html").read_text(encoding="utf-8")
    values = {
        "TITLE": html.escape(title if title is not None else f"Episode {episode.id}"),
        "NO_PICTURE": NO_PICTURE,
        "DATA": data,
    }
    # in one pass: placeholders within values are kept
    page = re.sub(r"\$([A-Z_]+)\b", lambda found: values[found[1]], template)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page)
    return path


def _shown_steps(
    recorded: StateTrajectoryRecord,
    draw: Callable[[StateTrajectoryRecord, StateRecord], bytes | None],
    stored: Callable[[bytes], int],
    decisions: Sequence[Sequence[Mapping[str, Any]]],
    drawn: Sequence[Mapping[str, Any]],
    every_k_states: int,
) -> list[dict[str, Any]]:
    """Return the content of the page for each step, or sub-step.

    :param draw: Draws a step of an episode.
    :param stored: Returns the number of a picture.
    :param decisions: The decisions of each environment step.
    :param drawn: The first steps, if they are equal to those of an episode that is drawn already.
    :param every_k_states: Draw every k-th state.
    """

    def with_numbers(entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return an observation with numbers of stored pictures instead of images."""
        return {name: stored(value) if isinstance(value, bytes) else value for name, value in entry.items()}

    episode = recorded.by_substep()
    steps: list[dict[str, Any]] = []
    decided = _by_substep(recorded, decisions)
    for record, summary in zip(episode.step_records, step_summaries(episode), strict=True):
        if len(steps) < len(drawn):
            picture = drawn[len(steps)]["picture"]
        elif len(steps) % every_k_states and len(steps) + 1 < len(episode.step_records):
            picture = steps[-1]["picture"]
        else:
            png = draw(episode, record)
            picture = None if png is None else stored(png)
        made = decided[len(steps)] if len(steps) < len(decided) else ()
        steps.append(
            {
                **summary._asdict(),
                "picture": picture,
                "reward": "" if summary.reward is None else f"{summary.reward:.6g}",
                # JSON has no infinite numbers; the chart keeps the last sum before them
                "total": summary.total if math.isfinite(summary.total) else (steps[-1]["total"] if steps else 0.0),
                "total_text": f"{summary.total:.6g}",
                "decisions": [
                    {**decision, "observation": [with_numbers(entry) for entry in decision["observation"]]}
                    for decision in made
                ],
            }
        )
    return steps


def _side_by_side(
    steps: Sequence[Sequence[dict[str, Any]]], episodes: Sequence[StateTrajectoryRecord]
) -> list[list[dict[str, Any] | None]]:
    """Return the aligned steps of two episodes; `None` where one has fewer."""
    left = [list(each) for each in steps]
    aligned: list[list[dict[str, Any] | None]] = [[], []]
    n_steps = max(map(len, episodes))
    for step in range(n_steps):
        taken = [
            [rest.pop(0) for _ in episode.step_records[step].by_substep()] if step < len(episode) else []
            for rest, episode in zip(left, episodes, strict=True)
        ]
        n_rows = max(map(len, taken))
        for rows, own in zip(aligned, taken, strict=True):
            rows += [*own, *[None] * (n_rows - len(own))]
    return aligned


def _by_substep(
    episode: StateTrajectoryRecord, decisions: Sequence[Sequence[Mapping[str, Any]]]
) -> list[Sequence[Mapping[str, Any]]]:
    """Return the decisions of each step, or of each recorded sub-step."""
    made: list[Sequence[Mapping[str, Any]]] = []
    for record, in_step in zip(episode.step_records, decisions, strict=False):
        n_shown = len(record.by_substep())
        is_each_shown = len(in_step) == n_shown
        made += [(one,) for one in in_step] if is_each_shown else [in_step, *[()] * (n_shown - 1)]
    return made


class TrajectoryPageWriter(TrajectoryWriter):
    """Write `<episode id>.html` for each finished episode.

    :param directory: Directory of the pages; created with the first episode.
    :param name: Title of the pages, before the number of the episode.
    :param pages: List to which the written pages are appended.
    :param every_k_states: Draw every k-th state.
    """

    def __init__(self, directory: str | Path, name: str, pages: list[Path], every_k_states: int = 1) -> None:
        self.directory = Path(directory)
        self.name = name
        self.pages = pages
        self.every_k_states = every_k_states

    @override(TrajectoryWriter)
    def write(self, episode_record: StateTrajectoryRecord) -> None:
        path = self.directory / f"{file_stem(episode_record.id)}.html"
        title = f"{self.name}, episode {len(self.pages) + 1}"
        page = write_trajectory_page(episode_record, path, title=title, every_k_states=self.every_k_states)
        self.pages.append(page)


def _episode(trajectory: StateTrajectoryRecord | str | Path) -> StateTrajectoryRecord:
    loaded: Any = load_trajectory(trajectory) if isinstance(trajectory, (str, Path)) else trajectory
    if not isinstance(loaded, StateTrajectoryRecord):
        raise ConfigError(
            f"{trajectory}: expected states of the simulation, as recorded in `trajectory_data/`; found a "
            f"{type(loaded).__name__}."
        )
    return loaded


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m maze.core.rendering.trajectory_page trajectory_data/<id>.pkl`."""
    parser = argparse.ArgumentParser(description="Writes an HTML page that browses a recorded episode.")
    parser.add_argument("trajectory", type=Path, help="a file in trajectory_data/")
    parser.add_argument("--output", type=Path, help="the page (default: beside the trajectory, with the suffix .html)")
    parser.add_argument(
        "--allow",
        nargs="+",
        default=(),
        metavar="TYPE",
        help="further types that the file may contain: their full names, or patterns such as my_project.envs.*",
    )
    options = parser.parse_args(arguments)
    try:
        episode: Any = load_trajectory(options.trajectory, extra_types=options.allow, hint="`--allow <type>`")
        print(write_trajectory_page(episode, options.output or options.trajectory.with_suffix(".html")))
    except MazeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())


FORMATS = (".mp4", ".gif")
_DPI = 80


def check_video_file(path: Path) -> None:
    """Check the file of a video before episodes are played.

    :raises ConfigError: Its format is unknown.
    :raises ConfigImportError: The encoder is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"video: expected a name that ends in .mp4 or .gif, found {path.name}.")
    if path.suffix.lower() == ".mp4":
        _encoder()


def write_video(episode: StateTrajectoryRecord, path: Path, frames_per_second: int = 30) -> Path:
    """Write a video of an episode as MP4 (H.264) or GIF.

    :param episode: The episode with its renderer.
    :param path: The file, whose suffix selects the format.
    :param frames_per_second: Steps per second.
    :raises ConfigError: The episode has no pictures.
    """
    from PIL import Image

    check_video_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    renderer = episode.renderer
    records = episode.by_substep().step_records
    pngs = (step_picture(renderer, record, _DPI) for record in records if renderer)
    frames = (np.asarray(Image.open(io.BytesIO(png)).convert("RGB")) for png in pngs if png is not None)
    first = next(frames, None)
    if first is None:
        raise ConfigError(
            f"video: episode {episode.id} has no pictures. Give the environment a renderer, or, if it is one of "
            "gymnasium's, a render mode `rgb_array`."
        )
    if path.suffix.lower() == ".gif":
        image, *others = map(Image.fromarray, (first, *frames))
        duration = max(20, round(1000 / frames_per_second))  # viewers slow down shorter durations
        image.save(path, save_all=True, append_images=others, duration=duration, loop=0)
        return path
    height, width = (size - size % 2 for size in first.shape[:2])  # the format needs even numbers
    writer = _encoder().write_frames(str(path), (width, height), fps=frames_per_second, macro_block_size=2)
    writer.send(None)
    try:
        for frame in (first, *frames):
            writer.send(np.ascontiguousarray(frame[:height, :width]))
    finally:
        writer.close()
    return path


def _encoder() -> Any:
    need = "video: an MP4 (other than a .gif) needs imageio-ffmpeg, which contains the encoder"
    return optional_package("imageio_ffmpeg", "video", need)
