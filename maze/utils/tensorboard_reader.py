"""Reads TensorBoard event files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maze.core.errors import ConfigError
from maze.core.log_stats.event_file import read_event_file

if TYPE_CHECKING:
    import pandas as pd

_LOGGER = logging.getLogger(__name__)


def tensorboard_to_pandas(file_path: str | Path) -> pd.DataFrame:
    """The scalars of an event file as a table with the index `(tag, step)` and the column `value`.

    A damaged or cut-off file is read as far as possible; the loss is logged as a warning and stands in
    `attrs["n_damaged"]` (places) and `attrs["n_lost_bytes"]` of the table.

    :param file_path: The event file, or a directory with event files, which are read in the order of their names.
    """
    import pandas as pd

    rows: list[tuple[str, int, float]] = []
    n_damaged = n_lost_bytes = 0
    for file in _event_files(Path(file_path)):
        content = read_event_file(file)
        n_damaged += content.n_damaged
        n_lost_bytes += content.n_lost_bytes
        if content.n_damaged:
            _LOGGER.warning(
                "%s is damaged in %d place(s): %d of %d bytes could not be read, %d events could.",
                file,
                content.n_damaged,
                content.n_lost_bytes,
                file.stat().st_size,
                len(content.events),
            )
        for event in content.events:
            rows += [(value.tag, event.step, value.simple_value) for value in event.summary.value if _is_scalar(value)]
    frame: pd.DataFrame = pd.DataFrame(rows, columns=["tag", "step", "value"]).set_index(["tag", "step"])
    frame.attrs.update(n_damaged=n_damaged, n_lost_bytes=n_lost_bytes)
    return frame


def _event_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(path.glob("events.out.tfevents.*"))
    if not files:
        raise ConfigError(
            f"{path} is no TensorBoard event file and no directory that holds one "
            f"(`events.out.tfevents.*`). A training writes them into its output directory."
        )
    return files


def _is_scalar(value: Any) -> bool:
    return bool(value.WhichOneof("value") == "simple_value")
