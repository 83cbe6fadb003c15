"""Restricted interpreter of pickles that never executes code named in the file.

Python's unpickler calls any function with any arguments, and sets attributes of any object. This interpreter knows the
data opcodes of protocols 2 to 5, and applies a :class:`Rule` before it makes or fills an object. It checks and reads in
one pass, so no second parser can interpret the file differently. :mod:`pickletools` splits the file into opcodes.
"""

from __future__ import annotations

import datetime
import encodings.raw_unicode_escape  # noqa: F401 (imported here and not because of a file)
import pickletools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import numpy as np


class Rule(NamedTuple):
    """Permitted uses of a name in a file.

    :param value: The object of the name.
    :param call: Makes an object from arguments in the file; None: not permitted.
    :param new: Makes an empty object from the arguments of `__new__`; None: not permitted.
    :param build: Fills an object of `call` or `new` once with a state in the file; None: not permitted.
    """

    value: Any
    call: Callable[..., Any] | None = None
    new: Callable[..., Any] | None = None
    build: Callable[[Any, Any], None] | None = None


class RefusedPickleError(Exception):
    """A pickle contains an operation that is not permitted, which the message describes."""


refuse = RefusedPickleError

Find = Callable[[str, str], Rule]
"""Returns the rule for a name, by module and qualified name, or raises :class:`RefusedPickleError`."""

_MAX_EXPANSION_PER_BYTE = 100
_MAX_EXPANSION = 1_000_000
_MAX_COPIES_PER_BYTE = 10
_MAX_KEY_PARTS = 1000
_MAX_FRAGILE_NESTING = 1000

# protocol 2 writes the names of Python 2
_RENAMED_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}

_ATOMS = frozenset({str, int, float, bool, bytes, complex, type(None)})
_LISTS = (list, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict)
_CONTAINERS = frozenset({*_LISTS, *_MAPPINGS, tuple, set, frozenset})
_SIZED = frozenset({*_CONTAINERS, str, bytes, bytearray})
_HASHED_AT_ONCE = (np.generic, np.dtype, datetime.date, datetime.time, datetime.timedelta, type)
_NAMES_ITSELF = (type, FunctionType, BuiltinFunctionType)


def read_pickle(content: bytes | memoryview, find: Find, persistent: Callable[[Any], Any] | None = None) -> Any:
    """Read the value of a pickle.

    :param content: The pickle, without further bytes.
    :param find: Returns the rule for each name in it.
    :param persistent: Returns the object of a persistent id.
    :raises RefusedPickleError: The pickle contains an operation that its rules do not permit.
    """
    value, n_bytes = read_first_pickle(content, find, persistent)
    if n_bytes != len(content):
        raise ValueError(f"{len(content) - n_bytes} bytes follow its end")
    return value


def read_first_pickle(
    content: bytes | memoryview, find: Find, persistent: Callable[[Any], Any] | None = None
) -> tuple[Any, int]:
    """Read the first pickle of the content; return its value and its length. See :func:`read_pickle`."""
    reader = _Reader(bytes(content), find, persistent)
    return reader.read(), reader.length


class _Reader:
    def __init__(self, content: bytes, find: Find, persistent: Callable[[Any], Any] | None) -> None:
        self.content = content
        self.length = 0
        """Length of the pickle, once it is read."""
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self._find = find
        self._persistent = persistent
        self._named: dict[tuple[str, str], Rule] = {}
        self._rules: dict[int, Rule] = {}
        self._unbuilt: dict[int, tuple[Any, Callable[[Any, Any], None]]] = {}
        self._shared: list[Any] = []
        self._n_nested = 0
        self._n_left = _MAX_EXPANSION + _MAX_COPIES_PER_BYTE * len(content)

    def read(self) -> Any:
        stack, memo, push = self.stack, self.memo, self.stack.append
        for opcode, argument, position in pickletools.genops(self.content):
            name = opcode.name
            if name in _VALUES:
                push(argument)
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name == "MARK":
                self.marks.append(len(stack))
            elif name == "STOP":
                self.length = position + 1  # type: ignore[operator]  # known for bytes
            elif name in _OPERATIONS:
                _OPERATIONS[name](self, argument)
            else:
                raise ValueError(f"the opcode {name} is not one for data")
        if len(stack) != 1 or self.marks:
            raise ValueError("it ends in the middle of a value")
        # repeated nested containers, whose traversal would take exponential time
        limit = _MAX_EXPANSION + _MAX_EXPANSION_PER_BYTE * len(self.content)
        sizes: dict[int, int] = {}
        total = 0
        for shared in self._shared:
            total += _expanded_size(shared, sizes)
            if total > limit:
                raise refuse(f"it has nested containers that expand to more than {limit} values")
        return stack[0]

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        value = self.memo[index]
        is_small = type(value) is tuple and len(value) <= 8 and all(type(part) in _ATOMS for part in value)
        if type(value) in _CONTAINERS and not is_small:
            self._shared.append(value)
        self.stack.append(value)

    # -- objects --------------------------------------------------------------------------------------------------

    def name(self, module: Any, qualified_name: Any) -> None:
        if not (type(module) is str and type(qualified_name) is str):
            raise refuse("it holds a name that is not a text")
        key = (_RENAMED_MODULES.get(module, module), qualified_name)
        rule = self._named.get(key)
        if rule is None:
            rule = self._named[key] = self._find(*key)
            self._rules[id(rule.value)] = rule
        self.stack.append(rule.value)

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self._make("called", self._rule(function).call, function, arguments, {})

    def new(self, has_names: bool) -> None:
        named_arguments = self.stack.pop() if has_names else {}
        arguments, klass = self.stack.pop(), self.stack.pop()
        self._make("made", self._rule(klass).new, klass, arguments, named_arguments)

    def _rule(self, found: Any) -> Rule:
        rule = self._rules.get(id(found))
        if rule is None:
            raise refuse(f"it calls a value ({type(found).__name__}) as if that were a class or function")
        return rule

    def _make(
        self, verb: str, make: Callable[..., Any] | None, what: Any, arguments: Any, named_arguments: Any
    ) -> None:
        if make is None:
            raise refuse(f"{_name(what)} would be {verb}, which is not permitted")
        if type(arguments) is not tuple or type(named_arguments) is not dict:
            raise refuse("it holds arguments in other types than a tuple and a dictionary")
        self._spend(arguments)
        made = make(*arguments, **named_arguments)
        build = self._rules[id(what)].build
        if build is not None:
            self._unbuilt[id(made)] = (made, build)
        self.stack.append(made)

    def build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        _, build = self._unbuilt.pop(id(made), (None, None))
        if build is None:
            raise refuse(f"it sets the state of {_name(made)}, which it has not made or has set already")
        self._spend(state if type(state) is tuple else (state,))
        build(made, state)
        if type(made) is np.ndarray and made.dtype.hasobject:
            for part in made.flat:
                self._count_nested(part)

    def _spend(self, values: Iterable[Any], n_parts: int = 0) -> None:
        """Bound the total size of arguments and states: a file can use the same large value any number of times."""
        self._n_left -= n_parts + sum(len(value) for value in values if type(value) in _SIZED)
        if self._n_left < 0:
            raise refuse("it repeats values more often than fits into memory")

    def _count_nested(self, part: Any) -> None:
        """Bound nested containers that Python deallocates recursively, which would overflow the stack."""
        if isinstance(part, (deque, defaultdict)) or (
            isinstance(part, np.ndarray) and (part.dtype.hasobject or not part.size)  # may be filled later
        ):
            self._n_nested += 1
            if self._n_nested > _MAX_FRAGILE_NESTING:
                raise refuse(f"it nests more than {_MAX_FRAGILE_NESTING} containers in a way that may crash Python")

    def persistent(self, key: Any) -> None:
        if self._persistent is None:
            raise refuse(f"it refers to data outside the file ({str(key)[:80]!r}); such pickles are not supported")
        self.stack.append(self._persistent(key))

    # -- containers -----------------------------------------------------------------------------------------------

    def extend(self, items: Iterable[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, _LISTS):
            raise refuse(f"it appends to {_name(target)}, which is not a list")
        if type(target) is list:
            target.extend(items)
            return
        for item in items:
            self._count_nested(item)
            target.append(item)

    def set_items(self, items: Sequence[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, _MAPPINGS) or len(items) % 2:
            raise refuse(f"it sets items of {_name(target)}, which is not a dictionary")
        for index in range(0, len(items), 2):
            key = items[index]
            if type(key) not in _ATOMS:
                self.check_key(key)
            if isinstance(target, defaultdict):
                self._count_nested(items[index + 1])
            target[key] = items[index + 1]

    def add(self, items: Iterable[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not set:
            raise refuse(f"it adds elements to {_name(target)}, which is not a set")
        target.update(self.checked_keys(items))

    def checked_keys(self, items: Iterable[Any]) -> list[Any]:
        items = list(items)
        for item in items:
            self.check_key(item)
        return items

    def check_key(self, key: Any) -> None:
        """Refuse keys whose hash takes exponential time (repeated nested tuples) or overflows the stack."""
        left = [key]
        n_parts = 0
        for n_parts, part in enumerate(left):  # grows in the loop
            if n_parts > _MAX_KEY_PARTS:
                raise refuse("it holds a key of too many parts")
            kind = type(part)
            if isinstance(part, tuple):
                left.extend(part)
            elif not (
                kind in _ATOMS
                or kind is frozenset  # its parts are checked already
                or isinstance(part, (*_NAMES_ITSELF, *_HASHED_AT_ONCE))
                or getattr(kind, "__hash__", None) is object.__hash__
                or isinstance(part, Enum)  # its rule requires the default hash
                or (id(kind) in self._rules and self._rules[id(kind)].call is kind)  # a trusted class
            ):
                raise refuse(f"it uses {_name(part)} as a key, which is not permitted")
        self._spend((), n_parts)


def _expanded_size(value: Any, sizes: dict[int, int]) -> int:
    """Count the values that a traversal of a container visits; `sizes` caches the counts of inner containers."""
    if id(value) in sizes:
        return sizes[id(value)]
    running: list[tuple[Any, list[Any]]] = [(value, _parts(value))]
    sizes[id(value)] = -1
    while running:
        container, left = running[-1]
        while left:
            part = left.pop()
            size = sizes.get(id(part))
            if size is None:
                sizes[id(part)] = -1
                running.append((part, _parts(part)))
                break
            if size < 0:
                raise refuse("it has a container that contains itself")
        else:
            sizes[id(container)] = 1 + sum(sizes[id(part)] for part in _parts(container)) + len(container)
            running.pop()
    return sizes[id(value)]


def _parts(container: Any) -> list[Any]:
    values = container.values() if isinstance(container, dict) else container
    return [part for part in values if type(part) in _CONTAINERS]


def _name(value: Any) -> str:
    kind = value if isinstance(value, _NAMES_ITSELF) else type(value)
    return f"`{kind.__module__}.{kind.__qualname__}`"


# Opcodes whose argument is a value.
_VALUES = frozenset({
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
    "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8",
})  # fmt: skip

_OPERATIONS: dict[str, Callable[[_Reader, Any], object]] = {
    "PROTO": lambda r, _: None,
    "FRAME": lambda r, _: None,
    "NONE": lambda r, _: r.stack.append(None),
    "NEWTRUE": lambda r, _: r.stack.append(True),
    "NEWFALSE": lambda r, _: r.stack.append(False),
    "EMPTY_TUPLE": lambda r, _: r.stack.append(()),
    "TUPLE1": lambda r, _: r.stack.append((r.stack.pop(),)),
    "TUPLE2": lambda r, _: r.stack.append((r.stack.pop(-2), r.stack.pop())),
    "TUPLE3": lambda r, _: r.stack.append((r.stack.pop(-3), r.stack.pop(-2), r.stack.pop())),
    "TUPLE": lambda r, _: r.stack.append(tuple(r.since_mark())),
    "EMPTY_LIST": lambda r, _: r.stack.append([]),
    "LIST": lambda r, _: r.stack.append(r.since_mark()),
    "APPEND": lambda r, _: r.extend((r.stack.pop(),)),
    "APPENDS": lambda r, _: r.extend(r.since_mark()),
    "EMPTY_DICT": lambda r, _: r.stack.append({}),
    "SETITEM": lambda r, _: r.set_items((r.stack.pop(-2), r.stack.pop())),
    "SETITEMS": lambda r, _: r.set_items(r.since_mark()),
    "EMPTY_SET": lambda r, _: r.stack.append(set()),
    "ADDITEMS": lambda r, _: r.add(r.since_mark()),
    "FROZENSET": lambda r, _: r.stack.append(frozenset(r.checked_keys(r.since_mark()))),
    "POP": lambda r, _: r.stack.pop(),
    "DUP": lambda r, _: r.stack.append(r.stack[-1]),
    "BINGET": lambda r, index: r.recall(index),
    "LONG_BINGET": lambda r, index: r.recall(index),
    "BINPUT": lambda r, index: r.remember(index),
    "LONG_BINPUT": lambda r, index: r.remember(index),
    "GLOBAL": lambda r, names: r.name(*names.split(" ")),
    "STACK_GLOBAL": lambda r, _: r.name(r.stack.pop(-2), r.stack.pop()),
    "REDUCE": lambda r, _: r.call(),
    "BUILD": lambda r, _: r.build(),
    "NEWOBJ": lambda r, _: r.new(has_names=False),
    "NEWOBJ_EX": lambda r, _: r.new(has_names=True),
    "BINPERSID": lambda r, _: r.persistent(r.stack.pop()),
}
