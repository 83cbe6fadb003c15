"""Which requests are processed now, and which of them together: turns by client, batches of rows."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from time import perf_counter, thread_time
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
_BLOCKING_SECONDS = 0.004
"""Networks that take longer run in a thread, so that other requests are read meanwhile."""


class Row(NamedTuple):
    """What one decision is made of.

    :param inputs: Network inputs, without the batch dimension.
    :param rng: Draws the action; None: the most probable one.
    :param note: Whatever is to be known about it when the batch was decided.
    :param states: Hidden states by state key, without the batch dimension; empty where none are carried.
    :param finish: Makes the row's answer of its decision, in the event loop. It is not called if the answer is not
        awaited any more.
    """

    inputs: Mapping[str, Array]
    rng: np.random.Generator | None
    note: Any
    states: Mapping[str, Array] = MappingProxyType({})
    finish: Callable[[Any], Any] = lambda decision: decision


class Turns:
    """Divides a capacity among clients: one that is exceeded is given to the waiting clients in turn.

    Requests of one client are served in their order. A client with many requests, or a large one in many parts, delays
    another client's request by one of its own at most.

    :param capacity: Units in use at a time and in one pass of the event loop, such as rows or bytes.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._n_used = 0
        self._queues: OrderedDict[Hashable, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()
        self.waiting: Counter[Hashable] = Counter()
        """Units that wait, by client."""

    @asynccontextmanager
    async def turn(self, client: Hashable, units: int) -> AsyncIterator[None]:
        """Waits for the client's turn, and holds the units within the block.

        :param client: The client.
        :param units: Units of the capacity; more than all count as all.
        """
        units = min(units, self._capacity)
        if not self._queues and self._n_used + units <= self._capacity:
            self._n_used += units
        else:
            await self._wait(client, units)
        try:
            yield
        finally:
            # in the next pass of the event loop, so that work without a pause in it is bounded in each pass
            asyncio.get_running_loop().call_soon(self._give_back, units)

    async def _wait(self, client: Hashable, units: int) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, deque()).append((units, granted))
        self.waiting[client] += units
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():  # granted and cancelled in the same pass of the event loop
                self._give_back(units)
            raise
        finally:
            self.waiting[client] -= units
            if not self.waiting[client]:
                del self.waiting[client]

    def _give_back(self, units: int) -> None:
        self._n_used -= units
        while self._queues:
            client, queue = next(iter(self._queues.items()))
            units, granted = queue[0]
            if not granted.cancelled():
                if self._n_used + units > self._capacity:
                    return
                self._n_used += units
                granted.set_result(None)
            queue.popleft()
            del self._queues[client]
            if queue:
                self._queues[client] = queue  # the last one now


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

    A batch is closed as soon as a pass of the event loop adds no row to it, so that a single request does not wait for
    others. The delay bounds how long rows may be added. A network that takes milliseconds runs in a thread; rows that
    arrive meanwhile form the next batch.

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
                self._deliver(rows, futures, self._answers(key, rows))
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "maze-serve")
        self._in_thread = True

        def done(finished: asyncio.Future[list[list[Any]]]) -> None:
            self._in_thread = False
            for (rows, futures), answers in zip(parts, finished.result(), strict=True):
                self._deliver(rows, futures, answers)
            self._tick(loop)

        def work() -> list[list[Any]]:
            return [self._answers(key, rows) for rows, _ in parts]

        loop.run_in_executor(self._executor, work).add_done_callback(done)

    def _answers(self, key: Hashable, rows: Sequence[Row]) -> list[Any]:
        """One answer for each row; where there is none, the exception."""
        # beside a busy event loop, a thread waits for the interpreter's lock longer than for its network
        clock = thread_time if self._in_thread else perf_counter
        began = clock()
        try:
            return [answer for answer, _ in zip(self._decide(key, rows), rows, strict=True)]
        except Exception as error:
            if len(rows) == 1:
                return [error]
            return [self._answers(key, [row])[0] for row in rows]  # an error belongs to its own row only
        finally:
            self._seconds += 0.1 * (clock() - began - self._seconds)

    def _deliver(self, rows: Sequence[Row], futures: Sequence[asyncio.Future[Any]], answers: Sequence[Any]) -> None:
        self.n_waiting -= len(futures)
        for row, future, answer in zip(rows, futures, answers, strict=True):
            if future.done():  # the client has gone
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
                continue
            try:
                future.set_result(row.finish(answer))
            except Exception as error:
                future.set_exception(error)
