"""Worker processes, child side: the protocol of the pipe, and the loop that serves hosted objects.

A message is a code of one byte and the size of its payload, followed by the payload if there is one. The common step of
a vector environment has none. The parent's side is :mod:`maze.core.utils.worker_pool`.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import pickle
import queue
import select
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from maze.core.errors import ConfigError, EnvironmentFailedError
from maze.utils.exception_report import ExceptionReport
from maze.utils.process import depend_on_parent, use_one_thread

# to the worker
CALL = b"A"  # payload: name of the object, method, arguments, whether a file descriptor follows
CLOSE = b"C"
SHORT_CALLS = {"step": b"S", "reset": b"R"}
"""Frequent calls without arguments, of the object that was made first."""
# to the parent
RESULT = b"r"  # payload: an answer and its duration in seconds; none: the answer is `None`
FAILED = b"f"  # payload: ExceptionReport

_HEAD = struct.Struct("=cQ")  # code, and number of bytes of the payload
_MOST_BYTES = 1 << 20  # number of bytes that are read at once
_METHODS = {code: method for method, code in SHORT_CALLS.items()}
GONE = (BrokenPipeError, ConnectionResetError, EOFError)
"""Errors that occur when the process at the other end of the pipe has ended."""
_GRACE_SECONDS = 2.0  # seconds in which a worker may end by itself after its parent has ended


class SharedMemory:
    """A mapped file without a name, so it cannot remain on disk; the mapping ends with the last array on it."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.map = mmap.mmap(fd, size)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone when the interpreter ends
        close(self.fd)


def map_memory(size: int, fd: int | None = None) -> SharedMemory:
    """Map memory that other processes can map as well. It is zero-initialised, and pages are allocated on first access.

    :param size: Number of bytes.
    :param fd: Memory of another process; `None`: create new memory.
    """
    size = max(size, mmap.PAGESIZE)
    if fd is None:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("maze")
        else:
            fd, path = tempfile.mkstemp(prefix="maze-")
            os.unlink(path)
        os.ftruncate(fd, size)
    return SharedMemory(fd, size)


class Stored(NamedTuple):
    """Position and type of an array in shared memory.

    :param slot: Index of the array among those of its size.
    :param shape: Its shape.
    :param dtype: Its type.
    """

    slot: int
    shape: tuple[int, ...]
    dtype: str

    def of(self, memory: Mapping[int, SharedMemory]) -> np.ndarray:
        """Return the array; it is valid until its slot is used again.

        :param memory: Shared memory by size of the arrays.
        """
        n_bytes = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        array: np.ndarray = np.ndarray(self.shape, self.dtype, memory[n_bytes].map, self.slot * n_bytes)
        return array


class Host:
    """Make objects, call their methods and close them, in a worker process or an actor of Ray.

    :param importing: Lock of the threads of a process: concurrent imports of modules that import each other, such as
        those of torch, fail.
    """

    def __init__(self, importing: contextlib.AbstractContextManager[Any] | None = None) -> None:
        self._importing = importing or contextlib.nullcontext()
        self.hosted: dict[str, Any] = {}
        """The objects by name."""
        self._memory: dict[int, SharedMemory] = {}

    def host(self, name: str, maker: bytes, *fd: int) -> None:
        """Make an object; the arguments are those of :meth:`~maze.core.utils.worker_pool.TaskPool.host`."""
        with self._importing:
            make = cloudpickle.loads(maker)
        self.hosted[name] = make(*fd)
        use_one_thread()  # an environment may have imported torch

    def receive(self, n_bytes: int, n_slots: int, fd: int) -> None:
        """Receive shared memory.

        :param n_bytes: Size of the arrays in it.
        :param n_slots: Number of arrays in it.
        :param fd: Its file descriptor.
        """
        self._memory[n_bytes] = map_memory(n_bytes * n_slots, fd)

    def call(self, name: str, method: str, *arguments: Any) -> tuple[Any, float]:
        """Call a method of a hosted object, or of this object if the name is empty.

        :return: The result and its duration in seconds.
        """
        given = [each.of(self._memory) if isinstance(each, Stored) else each for each in arguments]
        start = time.perf_counter()
        result = getattr(self.hosted[name] if name else self, method)(*given)
        return result, time.perf_counter() - start

    def close(self) -> None:
        """Close all objects: they may own processes."""
        for hosted in self.hosted.values():
            with contextlib.suppress(Exception):  # only the first failure is reported
                hosted.close()
        self.hosted.clear()


class Channel:
    """One end of the pipe between parent and worker.

    :param connection: End of a duplex pipe.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.fd = connection.fileno()

    def send(self, code: bytes, payload: Any = None) -> None:
        """Send a message.

        :param code: Its code.
        :param payload: Its payload; `None`: there is none.
        """
        self.send_pickled(code, b"" if payload is None else dumps(payload))

    def send_pickled(self, code: bytes, content: bytes) -> None:
        """Send a message with a pickled payload; pickling may fail and therefore precedes sending."""
        rest = memoryview(_HEAD.pack(code, len(content)) + content)
        while rest:
            rest = rest[os.write(self.fd, rest) :]

    def receive(self) -> tuple[bytes, Any]:
        """Wait for a message.

        :return: Code and payload.
        :raises EOFError: The process at the other end has ended.
        """
        code, size = _HEAD.unpack(self._read(_HEAD.size))
        return code, pickle.loads(self._read(size)) if size else None

    def _read(self, size: int) -> bytes | bytearray:
        content: bytes | bytearray = self._read_some(size)
        if len(content) < size:
            content = bytearray(content)
            while len(content) < size:
                content += self._read_some(size - len(content))
        return content

    def _read_some(self, size: int) -> bytes:
        try:
            part = os.read(self.fd, min(size, _MOST_BYTES))
        except ConnectionResetError as error:
            raise EOFError from error
        if not part:
            raise EOFError
        return part

    def flush(self) -> None:
        """Do nothing: a channel sends immediately."""

    def close(self) -> None:
        """Close this end."""
        self.connection.close()


class Outbox:
    """Send messages in a thread.

    :param channel: The channel; nothing else may send over it.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._messages: queue.SimpleQueue[tuple[bytes, bytes] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def send(self, code: bytes, payload: Any = None) -> None:
        """Send a message after those before it; its payload may be changed afterwards.

        :param code: Its code.
        :param payload: Its payload.
        """
        self._messages.put((code, dumps(payload)))

    def flush(self) -> None:
        """Wait until everything is sent or the other process has ended; nothing can be sent afterwards."""
        self._messages.put(None)
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # the other process has ended; the serving loop notices
            while (message := self._messages.get()) is not None:
                self._channel.send_pickled(*message)


def run_worker(
    connections: Sequence[Connection],
    alarm: Connection | None,
    in_background: bool,
    inherited: list[Connection],
    variables: Mapping[str, str],
) -> None:
    """Serve hosted objects until the parent closes the workers or ends. The main function of a worker process.

    :param connections: Ends of the pipes to the parent, one for each worker; each further one has a thread.
    :param alarm: Pipe that receives the numbers of signals, also while native code of an environment does not return;
        `None`: environments have no time limit.
    :param in_background: Whether a thread sends answers, so that work continues while the parent does not read.
    :param inherited: Connections that a forked process has inherited and has to close.
    :param variables: Environment variables of the parent; a fork server has those of its own start.
    """
    os.environ.clear()
    os.environ.update(variables)
    depend_on_parent()
    if alarm is not None:
        os.set_blocking(alarm.fileno(), False)
        signal.set_wakeup_fd(alarm.fileno(), warn_on_full_buffer=False)
    for other in inherited:
        other.close()
    threading.Thread(target=_leave_with_parent, args=(connections[0].fileno(),), daemon=True).start()
    importing = threading.Lock()
    for connection in connections[1:]:
        threading.Thread(target=_work, args=(Channel(connection), in_background, importing)).start()
    _work(Channel(connections[0]), in_background, importing)


def _work(channel: Channel, in_background: bool, importing: threading.Lock) -> None:
    """Serve the objects of one worker."""
    sender = Outbox(channel) if in_background else channel
    host = Host(importing)
    use_one_thread()
    with contextlib.suppress(*GONE):
        try:
            _serve(channel, sender, host)
        except GONE:
            raise
        except BaseException as error:  # SystemExit of an environment included: the parent receives every failure
            sender.send(FAILED, failure_of(error))
            sender.flush()
            if isinstance(error, SystemExit):
                raise
        finally:
            host.close()


def _serve(channel: Channel, sender: Channel | Outbox, host: Host) -> None:
    while True:
        code, payload = channel.receive()
        if code == CLOSE:
            return
        if payload is None:
            answer = getattr(next(iter(host.hosted.values())), _METHODS[code])()
            channel.send(RESULT, None if answer is None else (answer, 0.0))
            continue
        name, method, arguments, has_descriptor = payload
        if has_descriptor:
            arguments = (*arguments, recv_handle(channel.connection))
        sender.send(RESULT, host.call(name, method, *arguments))


def _leave_with_parent(fd: int) -> None:
    """End the process soon after the other side of the pipe is closed, even if an environment hangs."""
    poll = select.poll()
    poll.register(fd, 0)  # hang-up only
    poll.poll()
    time.sleep(_GRACE_SECONDS)
    os._exit(1)


def dumps(value: Any) -> bytes:
    """Pickle by reference (fast), or by value if that fails (classes of scripts and notebooks)."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:  # pickling runs code of the objects, which may raise anything
        return bytes(cloudpickle.dumps(value))


def failure_of(error: BaseException) -> ExceptionReport:
    """Report an exception to another process; that of an environment with its place."""
    if isinstance(error, EnvironmentFailedError) and error.place and error.__cause__ is not None:
        return ExceptionReport(error.__cause__, error.place)
    return ExceptionReport(error)


# -- pickling of configured objects ------------------------------------------------------------------------------------


def pickled(value: Any, what: str) -> bytes:
    """Pickle an object for another process or machine.

    :param value: The object.
    :param what: Its name, for messages.
    :raises ConfigError: It cannot be pickled; the message names the attribute that prevents it.
    """
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:  # pickling runs code of the objects, which may raise anything
        culprit = f"{unpicklable(value)} ({type(error).__name__}: {error})"
        advice = "Make it in the constructor there, or leave it out in `__getstate__`"
        raise ConfigError(f"{what} cannot be sent to other processes: {culprit}. {advice}.") from error


def unpicklable(value: Any, path: str = "") -> str:
    """Name the innermost attribute that cannot be pickled.

    :param value: An object that cannot be pickled.
    :param path: Its attribute path.
    """
    name = f"{path} ({type(value).__name__})" if path else type(value).__name__
    parts: dict[str, Any] = {}
    if isinstance(value, dict):
        parts = {f"{path}[{key!r}]": part for key, part in value.items()}
    elif isinstance(value, list | tuple):
        parts = {f"{path}[{index}]": part for index, part in enumerate(value)}
    elif isinstance(value, partial):
        named = {f"{path}({key}=...)": part for key, part in value.keywords.items()}
        parts = {**{f"{path}({index})": part for index, part in enumerate(value.args)}, **named}
    elif getattr(value, "__closure__", None):
        names = value.__code__.co_freevars
        parts = {f"{path}.{key}": cell.cell_contents for key, cell in zip(names, value.__closure__, strict=True)}
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        parts = {f"{path}.{key}": part for key, part in vars(value).items()}
    for part_path, part in parts.items():
        if not _is_picklable(part):
            return unpicklable(part, part_path.lstrip("."))
    return name


def _is_picklable(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # pickling runs code of the objects, which may raise anything
        return False
    return True
