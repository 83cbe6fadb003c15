"""Exceptions that travel between processes."""

from __future__ import annotations

import contextlib
import pickle
import traceback

from maze.core.errors import text_of


class ExceptionReport:
    """Hold an exception with its traceback as text, in a form that can always be pickled.

    :param exception: The exception; only a raised one has a traceback.
    :param place: Environment, sub-step, step and seed of the exception; empty: unknown.
    """

    def __init__(self, exception: BaseException, place: str = "") -> None:
        self.text = text_of(exception)
        """Type and message."""
        self.traceback = "".join(traceback.format_exception(exception))
        self.place = place
        self._pickled: bytes | None = None
        with contextlib.suppress(Exception):  # pickling runs code of the exception's class, which may raise anything
            content = pickle.dumps(exception)
            if type(pickle.loads(content)) is type(exception):
                self._pickled = content

    @property
    def original(self) -> BaseException | None:
        """The exception; `None`: it cannot be pickled, or not be restored."""
        with contextlib.suppress(Exception):
            return pickle.loads(self._pickled) if self._pickled is not None else None
        return None

    @property
    def exception(self) -> BaseException:
        """The exception; one that cannot be restored is replaced by a `RuntimeError` with its type and text."""
        return self.original or RuntimeError(self.text)

    def __str__(self) -> str:
        return self.traceback

    def __repr__(self) -> str:
        return f"ExceptionReport({self.text})"
