"""Reader of TensorBoard event files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from maze.core.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

_LOGGER = logging.getLogger(__name__)


def tensorboard_to_pandas(file_path: str | Path) -> pd.DataFrame:
    """Return the scalars of an event file as a table with the index `(tag, step)` and the column `value`.

    A damaged or truncated file is read up to the damage, which is logged as a warning.

    :param file_path: The event file, or a directory with event files, which are read in the order of their names.
    :raises ConfigError: There is no event file.
    """
    import pandas as pd

    path = Path(file_path)
    files = [path] if path.is_file() else sorted(path.glob("events.out.tfevents.*"))
    if not files:
        raise ConfigError(
            f"{path}: expected a TensorBoard event file or a directory with one (`events.out.tfevents.*`)."
        )
    rows: list[tuple[str, int, float]] = []
    for file in files:
        content = read_event_file(file)
        if content.damage:
            _LOGGER.warning("%s is damaged: %s", file, content.damage)
        for event in content.events:
            scalars = (value for value in event.summary.value if value.WhichOneof("value") == "simple_value")
            rows += [(value.tag, event.step, value.simple_value) for value in scalars]
    frame: pd.DataFrame = pd.DataFrame(rows, columns=["tag", "step", "value"]).set_index(["tag", "step"])
    return frame


class EventFileContent(NamedTuple):
    """The records of an event file.

    :param events: The events, `tensorboard.compat.proto.event_pb2.Event`.
    :param damage: The damage at which reading ended; empty: there is none.
    """

    events: list[Any]
    damage: str = ""


def read_event_file(file: str | Path) -> EventFileContent:
    """Read an event file up to its end, or up to the first damaged record."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub import errors
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

    reader, events = PyRecordReader_New(str(file)), list[Any]()
    try:
        while True:
            reader.GetNext()
            events.append(Event.FromString(reader.record()))
    except errors.OutOfRangeError:
        return EventFileContent(events)
    except (errors.DataLossError, DecodeError, MemoryError, OverflowError) as error:
        damage = f"{len(events)} events can be read, the next one cannot ({type(error).__name__})"
        return EventFileContent(events, damage)
