"""Exceptions that travel between processes."""

from __future__ import annotations

import pickle
import traceback


class ExceptionReport:
    """Hold an exception with its traceback as text, in a form that can always be pickled.

    An exception that cannot be pickled, or not be restored, is replaced by a `RuntimeError` with its type and text.

    :param exception: The exception; only a raised one has a traceback.
    """

    def __init__(self, exception: BaseException) -> None:
        self.type_name = f"{type(exception).__module__}.{type(exception).__qualname__}"
        self.message = _text_of(exception)
        self.traceback = "".join(traceback.format_exception(exception))
        self.exception: BaseException = exception if _survives_pickling(exception) else self._substitute()

    def _substitute(self) -> RuntimeError:
        return RuntimeError(f"{self.type_name}: {self.message}")

    def __str__(self) -> str:
        return self.traceback

    def __repr__(self) -> str:
        return f"ExceptionReport({self.type_name}: {self.message})"


def _text_of(exception: BaseException) -> str:
    try:
        return str(exception)
    except Exception as error:
        return f"(its text cannot be shown: {type(error).__name__})"


def _survives_pickling(exception: BaseException) -> bool:
    # Anything may go wrong here: pickling runs code of the exception's class.
    try:
        return type(pickle.loads(pickle.dumps(exception))) is type(exception)
    except Exception:
        return False
