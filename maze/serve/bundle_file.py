"""The file of a bundle: a zip archive of a few known members, each stored as it is, with SHA-256 sums of all.

Members are `manifest.json` (sizes and sums of the others), `bundle.json`, `arrays.bin` and `networks/<n>.onnx`. The
archive's comment is the sum of all bytes before it, so that no changed byte goes unnoticed, wherever it is.

Arrays in `bundle.json` are numbers where they are small, else places in `arrays.bin`.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from maze.core.errors import MazeError

Array = np.ndarray[Any, Any]

FORMAT, FORMAT_VERSION = "maze-policy-bundle", 1
MANIFEST, DESCRIPTION, ARRAYS = "manifest.json", "bundle.json", "arrays.bin"
MOST_MEMBERS = 1000
_MEMBER = re.compile(r"bundle\.json|arrays\.bin|networks/\d{1,4}\.onnx")
_SEAL = "maze-sha256:"
_SEAL_SIZE = len(_SEAL) + 64
_EARLIEST = (1980, 1, 1, 0, 0, 0)
"""The time of all members: equal contents make equal files."""
_DTYPES = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), "float32", "float64")
_MOST_INLINE = 64
_ALIGNMENT = 64


class BundleError(MazeError):
    """A bundle is damaged, not what it claims to be, made for another version, or lacks what is needed of it."""


def packed(members: Mapping[str, bytes]) -> bytes:
    """The file with these members.

    :param members: Contents by name.
    """
    files = {name: {"size": len(data), "sha256": sha256(data)} for name, data in members.items()}
    manifest = json.dumps({"format": FORMAT, "version": FORMAT_VERSION, "files": files}, indent=1).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in {MANIFEST: manifest, **members}.items():
            archive.writestr(zipfile.ZipInfo(name, _EARLIEST), data)
    content = buffer.getvalue()[:-2] + struct.pack("<H", _SEAL_SIZE)
    return content + f"{_SEAL}{sha256(content)}".encode()


def unpacked(content: bytes, name: str) -> dict[str, bytes]:
    """The members of a file, after all of it was found to be what was written. Nothing is written anywhere.

    :param content: All bytes of the file.
    :param name: Of the file, for messages.
    :raises BundleError: A byte differs, a member is unknown, missing, twice there or compressed, or it is no bundle.
    """
    seal = content[-_SEAL_SIZE:]
    if content[:4] != b"PK\x03\x04" or not seal.startswith(_SEAL.encode()):
        raise BundleError(f"{name} is no whole policy bundle. `maze-run --export <run> --out policy.maze` makes one.")
    if seal[len(_SEAL) :] != sha256(memoryview(content)[:-_SEAL_SIZE]).encode():
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
    """What a JSON text holds.

    :raises BundleError: It is none.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{where} is no JSON: {error}.") from error


def sha256(data: bytes | memoryview) -> str:
    """The sum in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def _members(archive: zipfile.ZipFile, size: int, name: str) -> dict[str, bytes]:
    """Reads members of which none can be larger than the file, and all of them together neither."""
    entries = archive.infolist()
    if len(entries) > MOST_MEMBERS:
        raise BundleError(f"{name} has {len(entries)} members; a bundle has at most {MOST_MEMBERS}.")
    names = [entry.filename for entry in entries]
    for member in names:
        if member != MANIFEST and not _MEMBER.fullmatch(member):
            raise BundleError(f"{name} has a member {member!r}, which no bundle has. Nothing was read or written.")
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
    """Turns arrays into JSON values; large ones go into `content`."""

    def __init__(self) -> None:
        self.content = bytearray()

    def stored(self, value: Any) -> Any:
        """The same with JSON values in place of arrays, at any depth."""
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
    """Arrays, which cannot be written to, in place of what stands for them, at any depth.

    :param value: As :meth:`ArrayWriter.stored` gave it.
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
