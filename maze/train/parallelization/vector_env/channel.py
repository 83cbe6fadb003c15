"""What a vector environment and a worker process say to one another over their pipe.

A message is one byte, followed by a payload for those codes that carry one. The common step is one byte each way.
"""

from __future__ import annotations

import os
import pickle
import queue
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle

from maze.core.env.faults import text_of
from maze.core.errors import EnvironmentFailedError

# to the worker
STEP = b"S"
RESET = b"R"
CALL = b"A"  # payload: method name, arguments
ROLL_OUT = b"O"  # payload: Order
CLOSE = b"C"
# to the vector environment
DONE = b"d"
RESULT = b"r"  # payload: whatever the call gives
FAILED = b"f"  # payload: Failure

_WITH_PAYLOAD = frozenset({CALL, ROLL_OUT, RESULT, FAILED})


class Failure(NamedTuple):
    """An exception on its way to another process.

    :param text: Type and message.
    :param traceback: The formatted original traceback.
    :param pickled: The exception itself, if it survives pickling.
    :param env_index: The environment that was being worked on, if known.
    :param place: Where exactly, if known.
    """

    text: str
    traceback: str
    pickled: bytes | None
    env_index: int | None
    place: str


class Channel:
    """One end of the pipe between a vector environment and a worker.

    :param connection: End of a duplex pipe.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.fd = connection.fileno()

    def send(self, code: bytes, payload: Any = None) -> None:
        """Sends a message.

        :param code: What it is.
        :param payload: What belongs to it.
        """
        self.send_pickled(code, dumps(payload) if code in _WITH_PAYLOAD else None)

    def send_pickled(self, code: bytes, content: bytes | None) -> None:
        """Sends a message whose payload is pickled already (which may fail, and must do so before anything is sent)."""
        os.write(self.fd, code)
        if content is not None:
            self.connection.send_bytes(content)

    def receive(self) -> tuple[bytes, Any]:
        """Waits for a message; EOFError when the other side is gone.

        :return: Code and payload.
        :raises EOFError: The other side is gone.
        """
        try:
            code = os.read(self.fd, 1)
        except ConnectionResetError as error:
            raise EOFError from error
        if not code:
            raise EOFError
        return code, pickle.loads(self.connection.recv_bytes()) if code in _WITH_PAYLOAD else None

    def close(self) -> None:
        """Closes this end."""
        self.connection.close()


class Outbox:
    """Sends messages in a thread of its own: who has something to say need not wait for the other side to listen.

    :param channel: The channel; from now on nobody else sends over it.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._messages: queue.SimpleQueue[tuple[bytes, bytes] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def send(self, code: bytes, payload: Any) -> None:
        """Sends a message when its turn has come; what it consists of may change afterwards.

        :param code: What it is.
        :param payload: What belongs to it.
        """
        self._messages.put((code, dumps(payload)))

    def flush(self) -> None:
        """Waits until all has been sent, or the other side is gone; nothing can be sent afterwards."""
        self._messages.put(None)
        self._thread.join()

    def _run(self) -> None:
        with suppress(OSError):  # the other side is gone; whoever receives notices
            while (message := self._messages.get()) is not None:
                self._channel.send_pickled(*message)


def dumps(value: Any) -> bytes:
    """Pickle by reference where that works (fast), by value where it does not (classes of scripts and notebooks)."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:  # pickling runs code of the objects, which may raise anything
        return bytes(cloudpickle.dumps(value))


def failure_of(error: BaseException, env_index: int | None) -> Failure:
    """Prepares an exception for the trip; what cannot be pickled survives as type name and text.

    :param error: The exception.
    :param env_index: The environment that was being worked on, if known.
    """
    place = ""
    if isinstance(error, EnvironmentFailedError) and error.__cause__ is not None:
        place, error = error.place, error.__cause__
    formatted = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Failure(text_of(error), formatted, _pickled(error), env_index, place)


def exception_of(failure: Failure) -> BaseException | None:
    """The exception that came from the other process, where it can be restored here."""
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
