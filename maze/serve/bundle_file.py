"""The file of a bundle: an uncompressed zip archive of known members with SHA-256 checksums.

Members are `manifest.json` (sizes and checksums of the others), `bundle.json`, `arrays.bin` and `networks/<n>.onnx`.
The archive's comment is the checksum of all bytes before it, so that every changed byte is detected.

Small arrays are numbers in `bundle.json`, others are stored in `arrays.bin`.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from maze.core.errors import MazeError

Array = np.ndarray[Any, Any]

FORMAT, FORMAT_VERSION = "maze-policy-bundle", 1
MANIFEST, DESCRIPTION, ARRAYS = "manifest.json", "bundle.json", "arrays.bin"
STATE, NEXT_STATE = "state/", "next_state/"
"""Prefixes of the names of hidden states in a graph, before a step and after it."""
MOST_MEMBERS = 1000
_MEMBER = re.compile(r"bundle\.json|arrays\.bin|networks/\d{1,4}\.onnx")
_PREFIX = "maze-sha256:"
_CHECKSUM_SIZE = len(_PREFIX) + 64
_EARLIEST = (1980, 1, 1, 0, 0, 0)
"""The time of all members, so that equal contents have equal files."""
_DTYPES = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), "float32", "float64")
_MOST_INLINE = 64
_ALIGNMENT = 64


class BundleError(MazeError):
    """A bundle is damaged, malformed, of another version, or lacks required parts."""


def packed(members: Mapping[str, bytes]) -> bytes:
    """Make the file of a bundle.

    :param members: Contents by name.
    """
    files = {name: {"size": len(data), "sha256": sha256(data)} for name, data in members.items()}
    manifest = json.dumps({"format": FORMAT, "version": FORMAT_VERSION, "files": files}, indent=1).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in {MANIFEST: manifest, **members}.items():
            archive.writestr(zipfile.ZipInfo(name, _EARLIEST), data)
    content = buffer.getvalue()[:-2] + struct.pack("<H", _CHECKSUM_SIZE)
    return content + f"{_PREFIX}{sha256(content)}".encode()


def unpacked(content: bytes, name: str) -> dict[str, bytes]:
    """Read the members of a file in memory, after a comparison of all checksums.

    :param content: All bytes of the file.
    :param name: Name of the file in messages.
    :raises BundleError: A byte differs, a member is unknown, missing, duplicated or compressed, or it is no bundle.
    """
    checksum = content[-_CHECKSUM_SIZE:]
    if content[:4] != b"PK\x03\x04" or not checksum.startswith(_PREFIX.encode()):
        raise BundleError(f"{name} is no whole policy bundle. `maze-run --export <run> --out policy.maze` makes one.")
    if checksum[len(_PREFIX) :] != sha256(memoryview(content)[:-_CHECKSUM_SIZE]).encode():
        raise BundleError(f"{name} is damaged or was changed: its SHA-256 sum is wrong. Use another copy of it.")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = _members(archive, len(content), name)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, struct.error) as error:
        raise BundleError(f"{name} cannot be read as an archive: {error}.") from error
    manifest = parsed_json(members.pop(MANIFEST, b"null"), f"{name}: {MANIFEST}")
    _check_manifest(manifest, members, name)
    return members


def parsed_json(data: bytes, where: str) -> Any:
    """Parse JSON.

    :raises BundleError: It is malformed.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{where} is no JSON: {error}.") from error


def sha256(data: bytes | memoryview) -> str:
    """The checksum in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def _members(archive: zipfile.ZipFile, size: int, name: str) -> dict[str, bytes]:
    """Read members whose sizes add up to at most the size of the file."""
    entries = archive.infolist()
    if len(entries) > MOST_MEMBERS:
        raise BundleError(f"{name} has {len(entries)} members; a bundle has at most {MOST_MEMBERS}.")
    names = [entry.filename for entry in entries]
    for member in names:
        if member != MANIFEST and not _MEMBER.fullmatch(member):
            raise BundleError(f"{name} has an unknown member {member!r}. Nothing was read or written.")
    if len(set(names)) < len(names):
        raise BundleError(f"{name} has members of the same name: {sorted(names)}.")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size or entry.flag_bits & 1:
            raise BundleError(
                f"{name}: its member `{entry.filename}` is compressed or encrypted ({entry.compress_size} bytes for "
                f"{entry.file_size}). Members of a bundle are stored as they are, so that none can fill the memory."
            )
    if sum(entry.file_size for entry in entries) > size:
        raise BundleError(f"{name}: its members claim more bytes than the file has.")
    return {entry.filename: archive.read(entry) for entry in entries}


def _check_manifest(manifest: Any, members: Mapping[str, bytes], name: str) -> None:
    files = manifest.get("files") if isinstance(manifest, dict) and manifest.get("format") == FORMAT else None
    if not isinstance(files, dict):
        raise BundleError(f"{name}: {MANIFEST} is missing, or not that of a policy bundle.")
    if manifest.get("version") != FORMAT_VERSION:
        raise BundleError(
            f"{name} has version {manifest.get('version')!r} of the format, this program reads {FORMAT_VERSION}. "
            "Export the policy again, or install the version of Maze that made the file."
        )
    if set(files) != set(members):
        raise BundleError(f"{name}: {MANIFEST} lists {sorted(files)}, the file has {sorted(members)}.")
    for member, data in members.items():
        expected = files[member]
        if not isinstance(expected, dict) or expected.get("sha256") != sha256(data):
            raise BundleError(f"{name}: its member `{member}` is not what {MANIFEST} lists: its SHA-256 sum is wrong.")


# -- arrays in JSON ----------------------------------------------------------------------------------------------------


class ArrayWriter:
    """Replace arrays by JSON values; large ones are appended to `content`."""

    def __init__(self) -> None:
        self.content = bytearray()

    def stored(self, value: Any) -> Any:
        """Copy a value with JSON in place of arrays, at any depth."""
        if isinstance(value, Mapping):
            return {str(key): self.stored(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.stored(entry) for entry in value]
        if isinstance(value, np.generic):
            return value.item()
        return self._array(value) if isinstance(value, np.ndarray) else value

    def _array(self, array: Array) -> dict[str, Any]:
        if array.dtype == np.float16:
            array = array.astype(np.float32)
        if array.dtype.name not in _DTYPES:
            raise BundleError(f"Arrays of {array.dtype} cannot be stored in a bundle.")
        place: dict[str, Any] = {"dtype": array.dtype.name, "shape": list(array.shape)}
        if array.size <= _MOST_INLINE and np.isfinite(array).all():
            return {**place, "values": array.reshape(-1).tolist()}
        self.content += bytes(-len(self.content) % _ALIGNMENT)
        offset = len(self.content)
        self.content += np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        return {**place, "offset": offset}


def loaded(value: Any, content: bytes) -> Any:
    """Restore arrays, which are read-only, at any depth.

    :param value: A value of :meth:`ArrayWriter.stored`.
    :param content: The block of bytes.
    :raises BundleError: An array has another type than numbers, or lies outside the block.
    """
    if isinstance(value, list):
        return [loaded(entry, content) for entry in value]
    if not isinstance(value, dict):
        return value
    if value.keys() in ({"dtype", "shape", "values"}, {"dtype", "shape", "offset"}):
        try:
            return _loaded_array(value, content)
        except (TypeError, ValueError, OverflowError) as error:
            raise BundleError(f"An array cannot be read: {error}.") from error
    return {key: loaded(entry, content) for key, entry in value.items()}


def _loaded_array(place: Mapping[str, Any], content: bytes) -> Array:
    if place["dtype"] not in _DTYPES:
        raise ValueError(f"the type {place['dtype']!r} is none of {', '.join(_DTYPES)}")
    dtype, shape = np.dtype(place["dtype"]), tuple(int(size) for size in place["shape"])
    if any(size < 0 for size in shape):
        raise ValueError(f"the shape {shape} is negative")
    n_values = math.prod(shape)
    if "values" in place:
        array: Array = np.array(place["values"], dtype)
    else:
        offset = int(place["offset"])
        if offset < 0 or offset + n_values * dtype.itemsize > len(content):
            raise ValueError("it lies outside the file")
        array = np.frombuffer(content, dtype.newbyteorder("<"), n_values, offset)
    array = array.reshape(shape)
    array.flags.writeable = False
    return array


# -- graphs that refer to other files ----------------------------------------------------------------------------------

# Numbers of the fields in onnx.proto that contain tensors.
_TENSOR, _EXTERNAL_DATA, _DATA_LOCATION = "tensor", 13, 14
_MESSAGES: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: _TENSOR, 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: _TENSOR, 6: "graph", 10: _TENSOR, 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: _TENSOR, 2: _TENSOR},
}
_DEEPEST = 64


def refuse_external_data(content: bytes) -> None:
    """Refuse graphs with external data, for which onnxruntime would read other files.

    :param content: A serialised `ModelProto`.
    :raises BundleError: A tensor is stored in another file, or the bytes are no such message.
    """
    try:
        _walk(memoryview(content), "model", 0)
    except (IndexError, ValueError) as error:
        raise BundleError(f"A network of the bundle is no ONNX graph: {error}.") from error


def _walk(message: memoryview, kind: str, depth: int) -> None:
    if depth > _DEEPEST:
        raise ValueError("it is nested too deeply")
    parts = _MESSAGES.get(kind, {})
    for number, value in _fields(message):
        if kind == _TENSOR:
            if number == _EXTERNAL_DATA or (number == _DATA_LOCATION and value != 0):
                raise BundleError(
                    "A network of the bundle refers to another file (external data), which bundles must not. No other "
                    "file was read."
                )
        elif number in parts and isinstance(value, memoryview):
            _walk(value, parts[number], depth + 1)


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Yield numbers and values of the fields of a protobuf message."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        wire_type = key & 7
        if wire_type == 0:
            value, place = _varint(message, place)
            yield key >> 3, value
            continue
        if wire_type == 2:
            size, place = _varint(message, place)
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"it has a field of type {wire_type}")
        if place + size > len(message):
            raise ValueError("it ends too early")
        yield key >> 3, message[place : place + size]
        place += size


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise ValueError("a number is too long")
