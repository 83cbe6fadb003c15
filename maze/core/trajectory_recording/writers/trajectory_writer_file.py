"""One pickle file per episode."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

from maze.core.annotations import override
from maze.core.errors import EnvironmentContractError
from maze.core.trajectory_recording.records.trajectory_record import StateTrajectoryRecord
from maze.core.trajectory_recording.writers.trajectory_writer import TrajectoryWriter
from maze.core.utils.files import write_with_checksum


class TrajectoryWriterFile(TrajectoryWriter):
    """Write `<episode id>.pkl` atomically; `load_trajectory` reads it.

    :param log_dir: Directory of the files; created with the first episode.
    """

    def __init__(self, log_dir: str | Path = Path("./trajectory_data")) -> None:
        self.log_dir = Path(log_dir)

    @override(TrajectoryWriter)
    def write(self, episode_record: StateTrajectoryRecord) -> None:
        try:
            content = pickle.dumps(episode_record, protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise EnvironmentContractError(
                f"Episode {episode_record.id} cannot be stored: {error}. Maze states, maze actions, event attributes, "
                "serializable components and the renderer of a recorded environment have to be picklable."
            ) from error
        self.log_dir.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^\w.@=+-]", "_", str(episode_record.id))
        write_with_checksum(self.log_dir / f"{name}.pkl", content)
