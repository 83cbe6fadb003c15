"""The file of a bundle: an uncompressed zip archive of known members with a SHA-256 checksum.

Members are `bundle.json`, which contains the arrays, and `networks/<n>.onnx`. The archive's comment is the checksum of
all bytes before it, so that every changed byte is detected.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from maze.core.errors import MazeError
from maze.core.trajectory_recording.datasets.decision_data import decoded, encoded
from maze.core.utils.files import ZIP_ERRORS, zip_entries

Array = np.ndarray[Any, Any]

FORMAT, FORMAT_VERSION = "maze-policy-bundle", 2
DESCRIPTION = "bundle.json"
STATE, NEXT_STATE = "state/", "next_state/"
"""Prefixes of the names of hidden states in a graph, before a step and after it."""
_MEMBER = re.compile(r"networks/\d{1,4}\.onnx")
_PREFIX = "maze-sha256:"
_CHECKSUM_SIZE = len(_PREFIX) + 64
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # the time of all members, so that equal contents have equal files
# The key of each reference to external data in ONNX; the byte before it is the last one of its length, 8.
_EXTERNAL_DATA = re.compile(rb"(?<![\w/.:-])location")


class BundleError(MazeError):
    """A bundle is damaged, malformed, of another version, or lacks required parts."""


def packed(description: Mapping[str, Any], networks: Mapping[str, bytes]) -> bytes:
    """Make the file of a bundle.

    :param description: JSON and arrays.
    :param networks: Graphs by the names of their members.
    """
    described = {"format": FORMAT, "version": FORMAT_VERSION, **description}
    text = json.dumps(described, allow_nan=False, default=_plain).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in {DESCRIPTION: text, **networks}.items():
            archive.writestr(zipfile.ZipInfo(name, _EARLIEST), data)
    content = buffer.getvalue()[:-2] + struct.pack("<H", _CHECKSUM_SIZE)
    return content + f"{_PREFIX}{sha256(content)}".encode()


def unpacked(content: bytes, name: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Read the description and the networks of a file in memory, after a comparison of its checksum.

    :param content: All bytes of the file.
    :param name: Name of the file in messages.
    :raises BundleError: A byte differs, a member is unknown, missing, duplicated or compressed, a graph refers to
        another file, or it is not a bundle of this version.
    """
    checksum = content[-_CHECKSUM_SIZE:]
    if content[:4] != b"PK\x03\x04" or not checksum.startswith(_PREFIX.encode()):
        raise BundleError(f"{name} is not a complete policy bundle. `maze-run --export <run>` makes one.")
    if checksum[len(_PREFIX) :] != sha256(memoryview(content)[:-_CHECKSUM_SIZE]).encode():
        raise BundleError(f"{name} is damaged or was changed: its SHA-256 sum is wrong. Use another copy of it.")
    try:
        members = {member: bytes(data) for member, data in zip_entries(content).items()}
        description = json.loads(members.pop(DESCRIPTION, b"null"), object_hook=_restored)
    except (*ZIP_ERRORS, TypeError) as error:
        raise BundleError(f"{name} cannot be read: {error!r}.") from error
    for member, network in members.items():
        if not _MEMBER.fullmatch(member):
            raise BundleError(f"{name} has an unknown member {member!r}. Nothing was written.")
        if _EXTERNAL_DATA.search(network):
            raise BundleError(f"{name}: a network refers to another file (external data), which was not read.")
    found = (description.get("format"), description.get("version")) if isinstance(description, dict) else None
    if found != (FORMAT, FORMAT_VERSION):
        expected = f"expected the format and version {(FORMAT, FORMAT_VERSION)} in {DESCRIPTION}"
        raise BundleError(f"{name}: {expected}, found {found}. Export the policy again.")
    return description, members


def sha256(data: bytes | memoryview) -> str:
    """Return the checksum in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


# -- arrays in JSON ----------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Convert values that JSON has no type for."""
    if isinstance(value, np.ndarray):
        return encoded(value)
    if isinstance(value, np.generic):
        return value.item()
    return dict(value)


def _restored(entry: dict[str, Any]) -> Any:
    """Restore an array from its description; leave other objects unchanged."""
    is_array = entry.keys() in ({"dtype", "shape", "values"}, {"dtype", "shape", "base64"})
    return decoded(entry) if is_array else entry
