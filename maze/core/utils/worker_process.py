"""Worker processes, child side: the protocol of the pipe and the loop that serves a host.

A message is one byte, followed by a payload for those codes that carry one. The common step of a vector environment is
one byte each way. The parent's side is :mod:`maze.core.utils.worker_pool`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, ClassVar, NamedTuple

import cloudpickle

from maze.core.env.faults import text_of
from maze.core.errors import EnvironmentFailedError
from maze.utils.process import depend_on_parent, use_one_thread

# to the worker
CALL = b"A"  # payload: method, arguments, whether a file descriptor follows; it is answered
TELL = b"T"  # the same, without an answer
CLOSE = b"C"
SHORT_CALLS = {"step": b"S", "reset": b"R"}
"""Frequent calls without arguments."""
# to the parent
DONE = b"d"  # an answer that is `None`
RESULT = b"r"  # payload: an answer, or a report
FAILED = b"f"  # payload: Failure

_WITH_PAYLOAD = frozenset({CALL, TELL, RESULT, FAILED})
_METHODS = {code: method for method, code in SHORT_CALLS.items()}
GONE = (BrokenPipeError, ConnectionResetError, EOFError)
"""Errors that occur when the process at the other end of the pipe has ended."""
_GRACE_SECONDS = 2.0
"""Seconds in which a worker may end by itself after its parent has ended."""


class Host:
    """An object in a worker process whose methods the parent calls.

    A host that works ahead sets :attr:`has_work`: then :meth:`advance` runs between messages and sends its results with
    :attr:`report`.
    """

    sends_in_background: ClassVar[bool] = False
    """Whether a thread sends answers and reports, so that work continues while the parent does not read."""
    report: Callable[[Any], None]
    """Sends a result without a call."""

    @property
    def has_work(self) -> bool:
        """Whether :meth:`advance` has something to do."""
        return False

    def open(self) -> Any:
        """Build the objects of the host; the result is the first answer."""

    def method(self, name: str) -> Callable[..., Any]:
        """Return the method that a call names."""
        method: Callable[..., Any] = getattr(self, name)
        return method

    def advance(self) -> None:
        """Do a part of the work."""
        raise NotImplementedError

    def close(self) -> None:
        """Release everything; a second call does nothing."""


class Failure(NamedTuple):
    """An exception in a form for other processes.

    :param text: Type and message.
    :param traceback: The formatted original traceback.
    :param pickled: The pickled exception, if it can be pickled.
    :param place: Environment, sub-step, step and seed of the exception, if known.
    """

    text: str
    traceback: str
    pickled: bytes | None
    place: str


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
        :param payload: Its payload, for codes that carry one.
        """
        self.send_pickled(code, dumps(payload) if code in _WITH_PAYLOAD else None)

    def send_pickled(self, code: bytes, content: bytes | None) -> None:
        """Send a message with a pickled payload; pickling may fail and therefore precedes sending."""
        os.write(self.fd, code)
        if content is not None:
            self.connection.send_bytes(content)

    def receive(self) -> tuple[bytes, Any]:
        """Wait for a message.

        :return: Code and payload.
        :raises EOFError: The process at the other end has ended.
        """
        try:
            code = os.read(self.fd, 1)
        except ConnectionResetError as error:
            raise EOFError from error
        if not code:
            raise EOFError
        return code, pickle.loads(self.connection.recv_bytes()) if code in _WITH_PAYLOAD else None

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
        self._messages: queue.SimpleQueue[tuple[bytes, bytes | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def send(self, code: bytes, payload: Any = None) -> None:
        """Send a message after those before it; its payload may be changed afterwards.

        :param code: Its code.
        :param payload: Its payload, for codes that carry one.
        """
        self._messages.put((code, dumps(payload) if code in _WITH_PAYLOAD else None))

    def flush(self) -> None:
        """Wait until everything is sent or the other process has ended; nothing can be sent afterwards."""
        self._messages.put(None)
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # the other process has ended; the serving loop notices
            while (message := self._messages.get()) is not None:
                self._channel.send_pickled(*message)


def run_worker(connection: Connection, host: Host | bytes, inherited: list[Connection]) -> None:
    """Serve a host until the parent closes the worker or ends. The main function of a worker process.

    :param connection: End of the pipe to the parent.
    :param host: The host, pickled unless the process was forked.
    :param inherited: Connections that a forked process has inherited and has to close.
    """
    depend_on_parent()
    for other in inherited:
        other.close()
    channel = Channel(connection)
    threading.Thread(target=_leave_with_parent, args=(channel.fd,), daemon=True).start()
    sender: Channel | Outbox = channel
    served: Host | None = None
    with contextlib.suppress(*GONE):
        try:
            served = host if isinstance(host, Host) else cloudpickle.loads(host)
            assert served is not None
            if served.sends_in_background:
                sender = Outbox(channel)
            served.report = partial(sender.send, RESULT)
            use_one_thread()
            _answer(sender, served.open())
            use_one_thread()  # an environment may have imported torch
            _serve(channel, sender, served)
            served.close()
        except GONE:
            raise
        except BaseException as error:  # SystemExit of an environment included: the parent receives every failure
            sender.send(FAILED, failure_of(error))
            sender.flush()
            if isinstance(error, SystemExit):
                raise
        finally:
            if served is not None:
                with contextlib.suppress(Exception):  # only the first failure is reported
                    served.close()


def _serve(channel: Channel, sender: Channel | Outbox, host: Host) -> None:
    poll = select.poll()
    poll.register(channel.fd, select.POLLIN)
    while True:
        while not host.has_work or poll.poll(0):
            code, payload = channel.receive()
            if code == CLOSE:
                return
            if payload is None:
                _answer(sender, host.method(_METHODS[code])())
                continue
            method, arguments, has_descriptor = payload
            if has_descriptor:
                arguments = (*arguments, recv_handle(channel.connection))
            answer = host.method(method)(*arguments)
            if code == CALL:
                _answer(sender, answer)
        host.advance()


def _answer(sender: Channel | Outbox, answer: Any) -> None:
    sender.send(DONE if answer is None else RESULT, answer)


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


def failure_of(error: BaseException) -> Failure:
    """Convert an exception for another process; if it cannot be pickled, only its type name and text are kept."""
    place = ""
    if isinstance(error, EnvironmentFailedError) and error.__cause__ is not None:
        place, error = error.place, error.__cause__
    formatted = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Failure(text_of(error), formatted, _pickled(error), place)


def exception_of(failure: Failure) -> BaseException | None:
    """Return the exception of the other process; `None`: it cannot be unpickled."""
    try:
        return pickle.loads(failure.pickled) if failure.pickled is not None else None
    except Exception:  # unpickling runs code of the exception, which may raise anything
        return None


def _pickled(error: BaseException) -> bytes | None:
    try:
        pickled = pickle.dumps(error)
        return pickled if isinstance(pickle.loads(pickled), type(error)) else None
    except Exception:  # pickling runs code of the exception, which may raise anything
        return None
