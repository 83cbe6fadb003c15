"""Videos of recorded episodes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from maze.core.errors import ConfigError, optional_package
from maze.core.rendering.offscreen import step_picture
from maze.core.trajectory_recording.records.trajectory_record import StateTrajectoryRecord

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
