"""The file that normalization statistics are kept in."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

from maze.core.errors import CheckpointError
from maze.core.utils.files import write_sealed
from maze.core.utils.safe_pickle import safe_load
from maze.core.wrappers.observation_normalization.normalization_strategies.base import StatisticsType

StructuredStatisticsType = dict[str, StatisticsType]
"""The statistics of each normalized observation, by its name."""

_HOW_TO_GET_ONE = (
    "A training whose wrappers normalize observations writes it (`maze-run -cn conf_train wrappers=vector_obs ...`); "
    "in Python, `obtain_normalization_statistics(env, n_samples=...)` does."
)


def save_statistics(path: Path, statistics: StructuredStatisticsType) -> None:
    """Writes statistics, completely or not at all.

    :param path: The file.
    :param statistics: Statistics by name of the observation.
    :raises CheckpointError: The file cannot be written.
    """
    content = pickle.dumps(statistics, protocol=4)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(path, content)
    except OSError as error:
        raise CheckpointError(f"Could not write the normalization statistics `{path}`: {error}.") from error


def load_statistics(path: Path) -> StructuredStatisticsType:
    """Reads statistics; nothing in the file is executed.

    :param path: The file.
    :raises CheckpointError: There is no such file, or it holds something else.
    """
    if not path.is_file():
        raise CheckpointError(f"There are no normalization statistics `{path}`. {_HOW_TO_GET_ONE}")
    loaded = safe_load(path)
    if not isinstance(loaded, Mapping) or not all(isinstance(entry, Mapping) for entry in loaded.values()):
        raise CheckpointError(
            f"`{path}` holds no normalization statistics: expected names and values by observation, found "
            f"{type(loaded).__name__}. {_HOW_TO_GET_ONE}"
        )
    return {str(name): dict(entry) for name, entry in loaded.items()}
