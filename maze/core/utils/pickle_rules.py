"""Rules for the names that data files may contain: each object is made by a checked constructor."""

from __future__ import annotations

import dataclasses
import datetime
import re
from abc import ABCMeta
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from enum import Enum, EnumMeta
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from maze.core.utils.pickle_reader import Rule, refuse

if TYPE_CHECKING:
    import torch

_MAX_RECORD_SIZE = 1 << 30
_DTYPE = re.compile(r"(b1|[iu][1248]|f(2|4|8|16)|c(8|16|32)|O8|M8|m8|[SUV]\d{1,9})")
_FACTORIES = (None, list, dict, set, int, float, str, tuple, bool)
_PLAIN = frozenset({int, float, str, bytes, bool, type(None), datetime.timezone, datetime.timedelta})
_UNCALLED = frozenset({list, dict, tuple, int, float, str, bytes, bool, object})
PLAIN_HASHES = (object.__hash__, Enum.__hash__, int.__hash__, str.__hash__)
"""Hash functions that run no code of a user's class."""
# Methods that Python calls when an instance is made, filled and dropped.
_RUN_BY_READING = ("__del__", "__getattr__", "__getattribute__")


# -- data classes -----------------------------------------------------------------------------------------------------


def data_class(klass: type) -> Rule:
    """Return the rule for a class whose instances are filled without calling any code of the class."""
    is_tuple = issubclass(klass, tuple)
    make = partial(_named_tuple, klass) if is_tuple else partial(_empty, klass)
    return Rule(klass, new=make, build=None if is_tuple else _Filler(klass))


def class_that_only_stores(klass: type) -> Rule | None:
    """Return the rule for a user's class that is not explicitly allowed: instances are filled without running its code.

    `None`: making, filling, hashing or removing an instance would run code of the class, or it cannot be filled: it has
    its own state format, or is derived from another type than `object`.
    """
    if issubclass(klass, Enum):
        is_usual = type(klass) is EnumMeta and klass.__hash__ in PLAIN_HASHES and not _defines(klass, "__del__")
        return Rule(klass, call=partial(_member, klass)) if is_usual else None
    if type(klass) not in (type, ABCMeta) or _defines(klass, *_RUN_BY_READING):
        return None
    is_tuple = issubclass(klass, tuple) and hasattr(klass, "_fields")
    if not is_tuple and klass.__new__ is not object.__new__:
        return None
    if not _defines(klass, "__setstate__"):
        return data_class(klass)
    if getattr(klass.__setstate__, "__module__", "") != dataclasses.__name__:  # type: ignore[attr-defined]
        return None
    return data_class(klass)._replace(build=partial(_fill_fields, klass))


def _defines(klass: type, *names: str) -> bool:
    return any(name in vars(base) for base in klass.__mro__ if base not in (object, tuple) for name in names)


def _member(klass: type[Enum], *arguments: Any) -> Enum:
    if len(arguments) == 1 and type(arguments[0]) in _PLAIN:
        member = klass._value2member_map_.get(arguments[0])
        if type(member) is klass:
            return member
    raise refuse(f"it holds a member that `{klass.__qualname__}` does not have")


def _fill_fields(klass: Any, made: Any, state: Any) -> None:
    """Fill a frozen dataclass with slots, whose state is the list of its fields."""
    names = [field.name for field in dataclasses.fields(klass)]
    if type(state) is not list or len(state) != len(names):
        raise refuse(f"it holds a damaged state of `{klass.__qualname__}`")
    _Filler(klass)(made, (None, dict(zip(names, state, strict=True))))


def trusted_class(klass: type) -> Rule:
    """Return the rule for a trusted class, which may be called with any arguments."""
    return Rule(klass, call=klass, new=partial(klass.__new__, klass), build=_fill_as_python_does)


class _Filler:
    """Store the state of a data class's instances, attribute by attribute."""

    def __init__(self, klass: type) -> None:
        self._klass = klass
        self._slots = {
            name: member
            for base in klass.__mro__
            for name, member in vars(base).items()
            if type(member).__name__ == "member_descriptor"
        }
        self._checked: set[str] = set()

    def __call__(self, made: Any, state: Any) -> None:
        attributes, in_slots = state if type(state) is tuple and len(state) == 2 else (state, None)
        for name, value in (in_slots or {}).items():
            if name not in self._slots:
                raise refuse(f"it sets `{name}`, which `{self._klass.__qualname__}` does not have")
            self._slots[name].__set__(made, value)
        if attributes:
            if not self._checked.issuperset(attributes):
                self._check(attributes)
            vars(made).update(attributes)

    def _check(self, attributes: Mapping[Any, Any]) -> None:
        for name in attributes:
            if type(name) is not str or callable(getattr(self._klass, name, None)):
                raise refuse(f"it replaces the method `{name}` of `{self._klass.__qualname__}`")
            self._checked.add(name)


def _empty(klass: type, *arguments: Any) -> Any:
    if arguments:
        raise refuse(f"it passes arguments to `{klass.__qualname__}`, which takes none")
    return object.__new__(klass)


def _named_tuple(klass: Any, *values: Any) -> Any:
    if len(values) != len(klass._fields):
        raise refuse(f"it passes {len(values)} values to `{klass.__qualname__}`, expected {len(klass._fields)}")
    return tuple.__new__(klass, values)


def _fill_as_python_does(made: Any, state: Any) -> None:
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    attributes, in_slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    if attributes:
        vars(made).update(attributes)
    for name, value in (in_slots or {}).items():
        setattr(made, name, value)


# -- the standard library ----------------------------------------------------------------------------------------------


def _checked(of: Callable[..., Any], is_permitted: Callable[..., bool], expected: str) -> Callable[..., Any]:
    """Return a function that calls `of` with permitted arguments only.

    :param of: Class or function that creates the object.
    :param is_permitted: Check of the arguments.
    :param expected: The permitted arguments, for messages.
    """

    def make(*arguments: Any) -> Any:
        if not is_permitted(*arguments):
            raise refuse(f"it makes a {getattr(of, '__name__', of)} of something else than {expected}")
        return of(*arguments)

    return make


def _of_plain(of: Callable[..., Any]) -> Callable[..., Any]:
    return _checked(of, lambda *given: all(type(each) in _PLAIN for each in given), "numbers and texts")


def _of_members(of: Callable[..., Any]) -> Callable[..., Any]:
    """Accept lists, which stand for sets below protocol 4, but no ranges, which could fill the memory."""

    def is_permitted(*given: Any) -> bool:
        return len(given) < 2 and all(
            type(each) in (list, tuple) and all(type(item) in _PLAIN or type(item) is complex for item in each)
            for each in given
        )

    return _checked(of, is_permitted, "a list of numbers and texts")


def _is_deque(items: Any = (), length: Any = None) -> bool:
    return type(items) in (tuple, list) and not items and type(length) in (int, type(None))


def _note_metadata(made: Any, state: Any) -> None:
    """Set the attribute that `torch.nn.Module.state_dict` adds to its dictionary."""
    if type(state) is not dict or set(state) - {"_metadata"} or not isinstance(state.get("_metadata", {}), dict):
        raise refuse("it sets attributes of a dictionary")
    vars(made).update(state)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """Encode a text as protocol 2 writes bytes."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise refuse("it encodes a text in another encoding than latin1")
    return text.encode("latin1")


# -- NumPy ------------------------------------------------------------------------------------------------------------


def _dtype(*arguments: Any) -> np.dtype[Any]:
    if arguments[1:] not in ((False, True), (0, 1), ()) or not _DTYPE.fullmatch(str(arguments[0])):
        raise refuse(f"it names the array type {str(arguments[:1])[:80]}, which NumPy does not write")
    copy: np.dtype[Any] = np.dtype(arguments[0], False, True)  # a copy, which can be filled
    return copy


def _fill_dtype(made: np.dtype[Any], state: Any) -> None:
    """Fill an array type with a state that NumPy writes for a valid type; others are refused."""
    if type(state) is not tuple or len(state) not in (8, 9):
        raise refuse("it holds a damaged array type")
    expected = _described_dtype(made, state)
    if expected.__reduce__()[2] != state or expected.itemsize != made.itemsize:
        raise refuse("it holds an array type whose parts do not fit each other")
    if made.isbuiltin != 1 or state[1] == _OTHER_ORDER or len(state) == 9:
        made.__setstate__(state)  # type: ignore[attr-defined]


_OTHER_ORDER = ">" if np.dtype("i4").__reduce__()[2][1] == "<" else "<"


def _described_dtype(made: np.dtype[Any], state: Any) -> np.dtype[Any]:
    _, order, subarray, names, fields, size, *_ = state
    if subarray is not None or order not in ("<", ">", "|") or not (names is None or 0 <= size <= _MAX_RECORD_SIZE):
        raise refuse("it holds an array type of other parts than numbers and texts")
    if names is not None:
        parts = [fields[name] for name in names]
        for part, *_ in parts:
            if not isinstance(part, np.dtype) or part.hasobject or part.names or part.subdtype:
                raise refuse("it holds an array type of other parts than numbers and texts")
        formats, offsets = [part[0] for part in parts], [part[1] for part in parts]
        return np.dtype({"names": list(names), "formats": formats, "offsets": offsets, "itemsize": size})
    if len(state) == 9 and state[8] is not None:
        name, n_units, *_ = state[8][1]
        made = np.dtype(f"{made.kind}8[{int(n_units)}{bytes(name).decode('ascii')}]")
    return made.newbyteorder(order) if order != "|" else made


def _array_shell(kind: Any, shape: Any, code: Any) -> Any:
    if kind is not np.ndarray or shape != (0,) or code not in (b"b", "b"):
        raise refuse("it makes an array with other arguments than NumPy")
    return np.ndarray((0,), "b")


def _fill_array(made: Any, state: Any) -> None:
    if type(state) is not tuple or len(state) not in (4, 5):
        raise refuse("it holds a damaged array")
    shape, dtype, is_fortran, content = state[-4:]
    n_values = _n_values(shape)
    if not isinstance(dtype, np.dtype) or is_fortran not in (True, False, 0, 1):
        raise refuse("it holds a damaged array")
    if dtype.hasobject:
        # bytes would be interpreted as addresses of objects
        is_whole = dtype == np.dtype(object) and type(content) is list and len(content) == n_values
    else:
        is_whole = type(content) is bytes and len(content) == n_values * dtype.itemsize
    if not is_whole:
        raise refuse("it holds an array whose values do not fit its shape and type")
    made.__setstate__((1, shape, dtype, bool(is_fortran), content))


def _n_values(shape: Any) -> int:
    if type(shape) is not tuple or len(shape) > 32 or not all(type(n) is int and n >= 0 for n in shape):
        raise refuse("it holds an array of an impossible shape")
    return prod(shape)


def _array_of_buffer(content: Any, dtype: Any, shape: Any, order: Any) -> Any:
    n_values = _n_values(shape)
    is_plain = isinstance(dtype, np.dtype) and not dtype.hasobject and type(content) in (bytes, bytearray)
    if not is_plain or order not in ("C", "F") or len(content) != n_values * dtype.itemsize:
        raise refuse("it holds an array whose values do not fit its shape and type")
    return np.ndarray(shape, dtype, bytearray(content) if type(content) is bytes else content, order=order)


def _scalar(dtype: Any, content: Any = None) -> Any:
    if not isinstance(dtype, np.dtype) or dtype.hasobject or type(content) is not bytes:
        raise refuse("it holds a number whose type is not a numeric type")
    if len(content) != dtype.itemsize:
        raise refuse("it holds a number whose bytes do not fit its type")
    return np.ndarray((), dtype, content)[()]


_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
# Indices into a generator's arrays, which NumPy does not check.
_POSITIONS = {"pos": (0, 624), "buffer_pos": (0, 4), "has_uint32": (0, 1), "has_gauss": (0, 1)}


def _bit_generator(kind: Any) -> Any:
    name = kind if type(kind) is str else getattr(kind, "__name__", "")
    if name not in _BIT_GENERATORS:
        raise refuse("it makes a random generator of an unknown kind")
    return getattr(np.random, name)(0)


def _fill_bit_generator(made: Any, state: Any) -> None:
    values = state[0] if type(state) is tuple and len(state) == 2 else state
    _check_positions(values)
    made.state = values


def _check_positions(state: Any) -> None:
    if type(state) is not dict:
        raise refuse("it holds a damaged random generator")
    for key, value in state.items():
        if key in _POSITIONS and not (type(value) is int and _POSITIONS[key][0] <= value <= _POSITIONS[key][1]):
            raise refuse(f"it holds a random generator with an impossible value of `{key}`")
        if type(value) is dict:
            _check_positions(value)
        elif isinstance(value, np.ndarray) and (value.dtype.kind not in "ui" or value.ndim != 1):
            raise refuse("it holds a random generator of other values than whole numbers")


def _generator(bits: Any, make: Any = None) -> Any:
    bits = bits if isinstance(bits, np.random.BitGenerator) else _bit_generator(bits)
    return np.random.Generator(bits)


def _seeds(*_: Any) -> Any:
    return np.random.SeedSequence(0)


def _random_state(bits: Any = "MT19937", make: Any = None) -> Any:
    bits = bits if isinstance(bits, np.random.MT19937) else _bit_generator("MT19937")
    return np.random.RandomState(bits)


def _fill_random_state(made: Any, state: Any) -> None:
    _check_positions(state)
    made.set_state(state)


# -- torch ------------------------------------------------------------------------------------------------------------


def storage_types() -> dict[str, torch.dtype]:
    """Return the types of torch's storages by their names in files."""
    import torch

    names = {
        "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
    }  # fmt: skip
    types = {f"torch.{name}Storage": dtype for name, dtype in names.items()}
    return {**types, "torch.storage.UntypedStorage": torch.uint8}


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any = False, hooks: Any = None, *_: Any
) -> torch.Tensor:
    """Make a view of a flat tensor, which represents a storage."""
    import torch

    numbers = (*size, *stride, offset) if type(size) in (tuple, torch.Size) and type(stride) is tuple else (None,)
    if not isinstance(storage, torch.Tensor) or not all(type(n) is int and n >= 0 for n in numbers):
        raise refuse("it holds a damaged tensor")
    n_needed = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if prod(size) else 0
    if n_needed > storage.numel() or prod(size) > storage.numel() or len(size) > 32:
        raise refuse("it holds a tensor that is larger than its values")
    tensor = storage.as_strided(size, stride, offset)
    return tensor.requires_grad_(bool(requires_grad)) if tensor.is_floating_point() else tensor


def _tensor_of_bytes(storage: Any, *arguments: Any) -> torch.Tensor:
    """Make a view of bytes, as newer types (unsigned integers) are stored."""
    import torch

    *geometry, dtype = arguments[:6]
    if not (isinstance(storage, torch.Tensor) and isinstance(dtype, torch.dtype)) or storage.numel() % dtype.itemsize:
        raise refuse("it holds a damaged tensor")
    return _tensor(storage.view(dtype), *geometry)


def _parameter(data: Any, requires_grad: Any = True, hooks: Any = None) -> Any:
    import torch

    if not isinstance(data, torch.Tensor):
        raise refuse("it makes a parameter of something else than a tensor")
    return torch.nn.Parameter(data.detach(), requires_grad=bool(requires_grad) and data.is_floating_point())


def _size(*arguments: Any) -> Any:
    import torch

    return torch.Size([int(n) for argument in arguments[:1] for n in argument])


# -- tables of rules --------------------------------------------------------------------------------------------------


@cache
def plain_rules() -> Mapping[str, Rule]:
    """Return the rules for containers, numbers, arrays and generators of NumPy, and values of the standard library."""
    make_set = _of_members(set)
    make_ordered = _checked(
        OrderedDict, lambda items=None: items is None or (type(items) is list and not items), "nothing"
    )
    plain_types = {
        "builtins": (complex, slice, range),
        "datetime": (datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    }
    value_types = {klass: f"builtins.{klass.__name__}" for klass in _UNCALLED}
    rules = {name: Rule(klass) for klass, name in value_types.items()}
    calls: dict[str, Callable[..., Any]] = {
        **{f"{module}.{of.__name__}": _of_plain(of) for module, types in plain_types.items() for of in types},
        "builtins.frozenset": _of_members(frozenset),
        "collections.deque": _checked(deque, _is_deque, "nothing and a length"),
        "collections.defaultdict": _checked(
            defaultdict, lambda factory: any(factory is each for each in _FACTORIES), "a plain type"
        ),
        "_codecs.encode": _encode,
        "numpy.random._pickle.__generator_ctor": _generator,
    }
    for core in ("core", "_core"):  # NumPy 1 and 2
        calls[f"numpy.{core}.multiarray.scalar"] = _scalar
        calls[f"numpy.{core}.numeric._frombuffer"] = _array_of_buffer
        rules[f"numpy.{core}.multiarray._reconstruct"] = Rule(_array_shell, call=_array_shell, build=_fill_array)
    rules |= {name: Rule(call, call=call) for name, call in calls.items()}
    rules |= {
        "builtins.set": Rule(set, call=make_set),  # may be the factory of a defaultdict
        "collections.OrderedDict": Rule(make_ordered, call=make_ordered, build=_note_metadata),
        "numpy.ndarray": Rule(np.ndarray),
        "numpy.dtype": Rule(np.dtype, call=_dtype, build=_fill_dtype),
        "numpy.random._pickle.__bit_generator_ctor": Rule(
            _bit_generator, call=_bit_generator, build=_fill_bit_generator
        ),
        "numpy.random._pickle.__randomstate_ctor": Rule(_random_state, call=_random_state, build=_fill_random_state),
    }
    for module in ("bit_generator", "_bit_generator"):
        rules[f"numpy.random.{module}.SeedSequence"] = Rule(np.random.SeedSequence)
        # Stored seeds are ignored; only generators that are spawned from a loaded one would depend on them.
        rules[f"numpy.random.{module}.__pyx_unpickle_SeedSequence"] = Rule(
            _seeds, call=_seeds, build=lambda made, state: None
        )
    for name, module in zip(_BIT_GENERATORS, ("_pcg64", "_pcg64", "_mt19937", "_philox", "_sfc64"), strict=True):
        rules[f"numpy.random.{module}.{name}"] = Rule(getattr(np.random, name))
    for name in _NUMPY_SCALARS:
        rules[f"numpy.{name}"] = Rule(getattr(np, name))
    return rules


# fmt: off
_NUMPY_SCALARS = (
    "bool", "bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64", "complex64", "complex128", "longlong", "ulonglong", "intc", "uintc", "str_", "bytes_", "datetime64",
    "timedelta64",
)
_SPACES = (
    "box.Box", "dict.Dict", "discrete.Discrete", "graph.Graph", "graph.GraphInstance", "multi_binary.MultiBinary",
    "multi_discrete.MultiDiscrete", "oneof.OneOf", "sequence.Sequence", "text.Text", "tuple.Tuple",
)
# fmt: on


@cache
def torch_rules() -> Mapping[str, Rule]:
    """Return the rules for tensors."""
    import torch

    rules = {name: Rule(dtype) for name, dtype in storage_types().items()}
    dtypes = (*storage_types().values(), torch.uint16, torch.uint32, torch.uint64)
    rules |= {str(dtype): Rule(dtype) for dtype in dtypes}
    calls: dict[str, Callable[..., Any]] = {
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _tensor_of_bytes,
        "torch._utils._rebuild_parameter": _parameter,
        "torch.Size": _size,
        "torch.device": _of_plain(torch.device),
    }
    return rules | {name: Rule(call, call=call) for name, call in calls.items()}


@cache
def space_rules() -> Mapping[str, Rule]:
    """Return the rules for gymnasium's spaces."""
    from gymnasium import spaces

    return {f"gymnasium.spaces.{name}": data_class(getattr(spaces, name.partition(".")[2])) for name in _SPACES}
