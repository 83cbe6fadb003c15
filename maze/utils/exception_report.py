"""Exceptions that travel between processes."""

from __future__ import annotations

import contextlib
import pickle
import traceback


class ExceptionReport:
    """Hold an exception with its traceback as text, in a form that can always be pickled.

    An exception that cannot be pickled, or not be restored, is replaced by a `RuntimeError` with its type and text.

    :param exception: The exception; only a raised one has a traceback.
    """

    def __init__(self, exception: BaseException) -> None:
        self.type_name = f"{type(exception).__module__}.{type(exception).__qualname__}"
        try:
            self.message = str(exception)
        except Exception as error:
            self.message = f"(its text cannot be shown: {type(error).__name__})"
        self.traceback = "".join(traceback.format_exception(exception))
        self.exception: BaseException = RuntimeError(f"{self.type_name}: {self.message}")
        with contextlib.suppress(Exception):  # pickling runs code of the exception's class
            if type(pickle.loads(pickle.dumps(exception))) is type(exception):
                self.exception = exception

    def __str__(self) -> str:
        return self.traceback

    def __repr__(self) -> str:
        return f"ExceptionReport({self.type_name}: {self.message})"
