"""Requests that arrive together are decided together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

_LOGGER = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
_BLOCKING_SECONDS = 0.004
"""Networks that take longer run in a thread, so that other requests are read meanwhile."""


class Row(NamedTuple):
    """What one decision is made of.

    :param inputs: Network inputs, without the batch dimension.
    :param rng: Draws the action; None: the most probable one.
    :param note: Whatever is to be known about it when the batch was decided.
    :param states: Hidden states by state key, without the batch dimension; empty where none are carried.
    """

    inputs: Mapping[str, Array]
    rng: np.random.Generator | None
    note: Any
    states: Mapping[str, Array] = MappingProxyType({})


Decide = Callable[[Hashable, Sequence[Row]], Sequence[Any]]
"""Decides a batch: its key and its rows, to one answer for each row."""


class _Batch:
    def __init__(self, deadline: float) -> None:
        self.rows: list[Row] = []
        self.futures: list[asyncio.Future[Any]] = []
        self.deadline = deadline
        self.n_before = 0


class Batcher:
    """Collects rows with equal keys until nothing more arrives, for a bounded time, and decides them in one call.

    Waiting costs nobody anything while requests are being read anyway: a batch is closed as soon as the event loop has
    gone around once without another row for it. The delay bounds how long others may go on arriving. A network that
    takes milliseconds runs in a thread; what arrives meanwhile is the next batch.

    :param decide: Called with the key of the batch and its rows; if it raises for several, it is called for each alone.
    :param max_batch: Most rows of a call.
    :param max_delay: Seconds that a row waits at most before its batch is closed.
    """

    def __init__(self, decide: Decide, max_batch: int = 64, max_delay: float = 0.002) -> None:
        self._decide, self._max_batch, self._max_delay = decide, max_batch, max_delay
        self._batches: dict[Hashable, _Batch] = {}
        self._is_ticking = False
        self._seconds = 0.0
        self._executor: ThreadPoolExecutor | None = None
        self._in_thread = False
        self.n_waiting = 0
        """Rows that have not been decided."""

    def submit(self, key: Hashable, row: Row) -> asyncio.Future[Any]:
        """Adds a row; the future has its answer.

        :param key: Rows with the same key can be decided together.
        :param row: The row.
        """
        loop = asyncio.get_running_loop()
        batch = self._batches.get(key)
        if batch is None:
            batch = self._batches[key] = _Batch(loop.time() + self._max_delay)
        future = loop.create_future()
        batch.rows.append(row)
        batch.futures.append(future)
        self.n_waiting += 1
        if not self._is_ticking:
            self._is_ticking = True
            loop.call_soon(self._tick, loop)
        return future

    def close(self) -> None:
        """Ends the thread, once it has decided what it was given."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_ticking = False
        for key, batch in list(self._batches.items()):
            if self._in_thread:
                return  # called again when the thread is done
            n_rows = len(batch.rows)
            if n_rows == batch.n_before or n_rows >= self._max_batch or loop.time() >= batch.deadline:
                del self._batches[key]
                self._run(loop, key, batch)
            batch.n_before = n_rows
        if self._batches and not self._is_ticking:
            self._is_ticking = True
            loop.call_soon(self._tick, loop)

    def _run(self, loop: asyncio.AbstractEventLoop, key: Hashable, batch: _Batch) -> None:
        size = self._max_batch
        parts = [(batch.rows[i : i + size], batch.futures[i : i + size]) for i in range(0, len(batch.rows), size)]
        if self._seconds < _BLOCKING_SECONDS:
            for rows, futures in parts:
                self._deliver(futures, self._answers(key, rows))
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "maze-serve")
        self._in_thread = True

        def done(finished: asyncio.Future[list[list[Any]]]) -> None:
            self._in_thread = False
            for (_, futures), answers in zip(parts, finished.result(), strict=True):
                self._deliver(futures, answers)
            self._tick(loop)

        def work() -> list[list[Any]]:
            return [self._answers(key, rows) for rows, _ in parts]

        loop.run_in_executor(self._executor, work).add_done_callback(done)

    def _answers(self, key: Hashable, rows: Sequence[Row]) -> list[Any]:
        """One answer for each row; where there is none, the exception."""
        began = perf_counter()
        try:
            return [answer for answer, _ in zip(self._decide(key, rows), rows, strict=True)]
        except Exception as error:
            if len(rows) == 1:
                return [error]
            return [self._answers(key, [row])[0] for row in rows]  # nobody answers for another's observation
        finally:
            self._seconds += 0.1 * (perf_counter() - began - self._seconds)

    def _deliver(self, futures: Sequence[asyncio.Future[Any]], answers: Sequence[Any]) -> None:
        self.n_waiting -= len(futures)
        for future, answer in zip(futures, answers, strict=True):
            if future.done():  # whoever asked has gone
                continue
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)
