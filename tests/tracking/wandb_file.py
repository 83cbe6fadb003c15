"""Reads what Weights & Biases has written offline: records of protobuf in the log format of LevelDB."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _FILE_HEADER = 32768, 7
_RECORD_HEADER = struct.Struct("<IHB")
_FULL, _LAST = 1, 4


def records(file: Path) -> Iterator[Any]:
    """The records of a `.wandb` file."""
    from wandb.proto import wandb_internal_pb2

    data = file.read_bytes()
    assert data.startswith(b":W&B")
    position, parts = _FILE_HEADER, b""
    while position + _RECORD_HEADER.size <= len(data):
        if _BLOCK - position % _BLOCK < _RECORD_HEADER.size:
            position += _BLOCK - position % _BLOCK  # padding
            continue
        _, length, kind = _RECORD_HEADER.unpack_from(data, position)
        position += _RECORD_HEADER.size
        parts += data[position : position + length]
        position += length
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def content(file: Path) -> dict[str, Any]:
    """Identity, group, settings, rows of numbers, artefacts and exit code of a run."""
    found: dict[str, Any] = {"rows": {}, "artifacts": {}, "exit_code": None}
    for record in records(file):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            found |= {"id": record.run.run_id, "group": record.run.run_group, "name": record.run.display_name}
            found.setdefault("settings", {}).update(config)
        elif kind == "history":
            row = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
            found["rows"].setdefault(row.get("_step", record.history.step.num), {}).update(row)
        elif kind == "artifact":
            names = [entry.path for entry in record.artifact.manifest.contents]
            found["artifacts"].setdefault(record.artifact.type, []).extend(names)
        elif kind == "exit":
            found["exit_code"] = record.exit.exit_code
    return found
