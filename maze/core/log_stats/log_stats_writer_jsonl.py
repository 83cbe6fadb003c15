"""Statistics as JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

import numpy as np

from maze.core.annotations import override
from maze.core.log_stats.log_stats import LogStats, LogStatsWriter
from maze.core.log_stats.stats_format import event_names, sample_values, scalar_value, statistic_name


class LogStatsWriterJSONL(LogStatsWriter):
    """Appends one line `{"step": 1, "path": "train/BaseEnvEvents/reward/mean", "value": 21.5}` per statistic.

    Distributions are written as lists; numbers that JSON does not know (NaN, infinities) as text.

    :param file: The file to append to; it and its directory are created when the first statistics arrive.
    """

    def __init__(self, file: str | Path) -> None:
        self.file = Path(file)
        self._stream: IO[str] | None = None

    @override(LogStatsWriter)
    def write(self, path: str | None, step: int, stats: LogStats) -> None:
        if self._stream is None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._stream = self.file.open("a", encoding="utf-8")
        for key, value in stats.items():
            parts = [path, *event_names(key.event), statistic_name(key)]
            row = {"step": step, "path": "/".join(part for part in parts if part), "value": _as_json(value)}
            self._stream.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        self._stream.flush()

    @override(LogStatsWriter)
    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def _as_json(value: Any) -> Any:
    samples = sample_values(value)
    if samples is not None:
        return [_as_json(sample) for sample in samples.tolist()]
    number = scalar_value(value)
    if number is None:
        return str(value)
    if not np.isfinite(number):
        return str(number)
    return int(number) if isinstance(value, (int, np.integer)) else number
