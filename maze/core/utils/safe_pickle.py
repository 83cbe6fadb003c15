"""Unpickling that executes nothing but the reconstruction of types on an allow-list.

A pickle names classes and functions and has them called. Here a name is looked up in the allow-list *before* anything
is imported; everything else is refused with its name and the way to allow it.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from abc import ABC, ABCMeta
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType
from typing import IO, Any

from maze.core.errors import CheckpointError

_BUILTINS = frozenset({"set", "frozenset", "bytearray", "complex", "slice", "range", "object", "list", "dict", "tuple"})

_NUMPY = frozenset({"numpy.ndarray", "numpy.dtype"})
_NUMPY_SCALARS = frozenset(
    f"numpy.{name}"
    for name in (
        "bool",
        "bool_",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "longlong",
        "ulonglong",
        "intc",
        "uintc",
        "str_",
        "bytes_",
        "datetime64",
        "timedelta64",
    )
)
_NUMPY_FUNCTIONS = frozenset(
    f"numpy.{core}.{name}"
    for core in ("core", "_core")
    for name in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
)
_NUMPY_RANDOM = frozenset(
    {
        "numpy.random._pickle.__generator_ctor",
        "numpy.random._pickle.__bit_generator_ctor",
        "numpy.random._pickle.__randomstate_ctor",
        "numpy.random._generator.Generator",
        "numpy.random.mtrand.RandomState",
        "numpy.random._pcg64.PCG64",
        "numpy.random._pcg64.PCG64DXSM",
        "numpy.random._mt19937.MT19937",
        "numpy.random._philox.Philox",
        "numpy.random._sfc64.SFC64",
        "numpy.random.bit_generator.SeedSequence",
        "numpy.random.bit_generator.__pyx_unpickle_SeedSequence",
        "numpy.random._bit_generator.SeedSequence",
        "numpy.random._bit_generator.__pyx_unpickle_SeedSequence",
    }
)
_STANDARD_LIBRARY = frozenset(
    {
        "collections.OrderedDict",
        "collections.defaultdict",
        "collections.deque",
        "collections.Counter",
        "copyreg._reconstructor",
        "datetime.date",
        "datetime.datetime",
        "datetime.time",
        "datetime.timedelta",
        "datetime.timezone",
        "decimal.Decimal",
        "fractions.Fraction",
        "pathlib.Path",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "uuid.UUID",
        "_codecs.encode",  # how protocol 2 and below write bytes
    }
)
_TORCH = frozenset({"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter", "torch.Size", "torch.device"})
_SPACES = ("gymnasium.spaces.*",)

_ALWAYS_ALLOWED = frozenset(
    {f"builtins.{name}" for name in _BUILTINS}
    | _NUMPY
    | _NUMPY_SCALARS
    | _NUMPY_FUNCTIONS
    | _NUMPY_RANDOM
    | _STANDARD_LIBRARY
    | _TORCH
)

# protocols before 3 write the names of Python 2
_RENAMED_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}

_registered: set[str] = set()


def register_safe_types(*types: type | str) -> None:
    """Allow types of your own in every file that is loaded safely from now on, in this process.

    :param types: Classes, their full names, or patterns like `my_project.envs.*` (all classes defined below a module).
    """
    _registered.update(_qualified_name(entry) for entry in types)


def registered_safe_types() -> frozenset[str]:
    """Names and patterns given to :func:`register_safe_types`."""
    return frozenset(_registered)


def safe_load(
    file: str | Path | IO[bytes],
    allowed: Iterable[type | str] = (),
    allow_pickle: bool = False,
    hint: str | None = None,
) -> Any:
    """Read a pickle; by default only types on the allow-list are reconstructed.

    Always allowed: containers, numbers, NumPy arrays and generators, gymnasium spaces, tensors, a few value types of
    the standard library, and event interfaces (classes whose methods do nothing).

    :param file: Path or binary stream.
    :param allowed: Further classes, full names, or patterns `package.module.*`.
    :param allow_pickle: Trust the file: allow everything, including code that runs while it is loaded.
    :param hint: How the caller's user opts in, for the error message.
    """
    name = str(file) if isinstance(file, (str, Path)) else str(getattr(file, "name", "<stream>"))
    try:
        if isinstance(file, (str, Path)):
            with Path(file).open("rb") as stream:
                return _load(stream, name, allowed, allow_pickle, hint)
        return _load(file, name, allowed, allow_pickle, hint)
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be read ({error}).") from error


def _load(stream: IO[bytes], name: str, allowed: Iterable[type | str], allow_pickle: bool, hint: str | None) -> Any:
    try:
        if allow_pickle:
            return pickle.load(stream)
        return _RestrictedUnpickler(stream, name, allowed, hint).load()
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # a damaged pickle can fail with nearly any type
        raise CheckpointError(
            f"{name}: is not a readable pickle ({type(error).__name__}: {error}). Expected a complete file written by "
            "Maze; it may be cut off, damaged or of another kind."
        ) from error


class _RestrictedUnpickler(pickle.Unpickler):
    """Finds only what the allow-list names.

    :param stream: Where the pickle is read from.
    :param name: Name of the file, for error messages.
    :param allowed: Classes, full names, or patterns `package.module.*`.
    :param hint: How the caller's user opts in.
    """

    def __init__(self, stream: IO[bytes], name: str, allowed: Iterable[type | str], hint: str | None) -> None:
        super().__init__(stream)
        self._name = name
        self._hint = hint
        entries = {*(_qualified_name(entry) for entry in allowed), *_registered, *_SPACES, *_ALWAYS_ALLOWED}
        self._names = {entry for entry in entries if not entry.endswith(".*")}
        self._prefixes = tuple(entry[:-1] for entry in entries if entry.endswith(".*"))

    def find_class(self, module_name: str, qualified_name: str) -> Any:
        module_name = _RENAMED_MODULES.get(module_name, module_name)
        full_name = f"{module_name}.{qualified_name}"
        if full_name == "torch.storage._load_from_bytes":
            return _load_storage
        if full_name in self._names:
            return _resolve(module_name, qualified_name)
        if module_name == "numpy.dtypes" and qualified_name.endswith("DType"):
            return _resolve(module_name, qualified_name)
        if full_name.startswith(self._prefixes):
            found = _resolve(module_name, qualified_name)
            # only what is defined there, not what such a module happens to import; no functions but those of events
            is_safe_kind = isinstance(found, type) or _is_harmless_interface(found)
            if is_safe_kind and f"{found.__module__}.".startswith(self._prefixes):
                return found
        elif module_name in sys.modules or module_name.startswith(("maze.", "maze_envs.")):
            found = _look_up(module_name, qualified_name)
            if _is_harmless_interface(found):
                return found
        raise CheckpointError(
            f"{self._name}: contains the type `{full_name}`, which is not on the list of types that are loaded from "
            "files (a pickle can run any code). If it is yours, allow it by name "
            f"({self._hint or '`allowed=[...]` or `register_safe_types(...)`'}); if you trust the whole file, pass "
            "`allow_pickle=True`."
        )

    def persistent_load(self, pid: Any) -> Any:
        raise CheckpointError(
            f"{self._name}: refers to data outside the file ({pid!r}); such pickles are not supported."
        )


def _qualified_name(entry: type | str) -> str:
    return entry if isinstance(entry, str) else f"{entry.__module__}.{entry.__qualname__}"


def _resolve(module_name: str, qualified_name: str) -> Any:
    found: Any = importlib.import_module(module_name)
    for part in qualified_name.split("."):
        found = getattr(found, part)
    return found


def _look_up(module_name: str, qualified_name: str) -> Any:
    """Like :func:`_resolve`, without running anything that an attribute access could run; None if there is nothing."""
    found: Any = importlib.import_module(module_name)
    for part in qualified_name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found


def _is_harmless_interface(found: Any) -> bool:
    """Whether this is an event interface or one of its methods: they do nothing, so a pickle may name and call them."""
    if isinstance(found, FunctionType):
        owner, _, _ = found.__qualname__.rpartition(".")
        return bool(owner) and _does_nothing(found)
    if type(found) not in (type, ABCMeta):
        return False
    classes = [base for base in found.__mro__ if base not in (object, ABC)]
    return all(_does_nothing(member) for base in classes for member in vars(base).values() if callable(member))


def _does_nothing(function: Any) -> bool:
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, FunctionType):
        return False
    return _is_empty_code(function.__code__.co_code) and not function.__code__.co_names


def _empty_codes() -> frozenset[bytes]:
    def with_docstring() -> None:
        """Text."""

    def with_pass() -> None:
        pass

    functions: list[Callable[[], None]] = [with_docstring, with_pass]
    return frozenset(function.__code__.co_code for function in functions)


def _is_empty_code(code: bytes) -> bool:
    return code in _EMPTY_CODES


_EMPTY_CODES = _empty_codes()


def _load_storage(data: bytes) -> Any:
    """What torch calls for tensors inside a pickle, without its permission to unpickle anything."""
    import torch

    return torch.load(io.BytesIO(data), weights_only=True)
