"""Micro-batching and turns of clients."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maze.serve.app import Turns
from maze.serve.served import Batcher


class Recorder:
    """Decides by negating, and records the batches."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.batches: list[tuple[Any, list[float]]] = []
        self.threads: set[int] = set()
        self.seconds = seconds

    def decide_batch(self, key: Any, rows: Sequence[float]) -> Sequence[float]:
        self.batches.append((key, list(rows)))
        self.threads.add(threading.get_ident())
        time.sleep(self.seconds)
        if any(row < 0 for row in rows):
            raise ValueError("negative")
        return [-row for row in rows]

    def batcher(self, **settings: Any) -> Batcher:
        return Batcher(self.decide_batch, lambda row, decision: decision, **settings)


def test_rows_that_arrive_together_form_one_batch_for_each_key() -> None:
    decide = Recorder()

    async def ask() -> list[float]:
        batcher = decide.batcher()
        return list(await asyncio.gather(*(batcher.submit(n % 2, float(n)) for n in range(6))))

    assert asyncio.run(ask()) == [0.0, -1.0, -2.0, -3.0, -4.0, -5.0]
    assert decide.batches == [(0, [0.0, 2.0, 4.0]), (1, [1.0, 3.0, 5.0])]


def test_a_batch_is_closed_at_its_size() -> None:
    decide = Recorder()

    async def ask() -> None:
        batcher = decide.batcher(max_batch=4)
        await asyncio.gather(*(batcher.submit("k", float(n)) for n in range(10)))
        assert batcher.n_waiting == 0

    asyncio.run(ask())
    assert [len(values) for _, values in decide.batches] == [4, 4, 2]


def test_a_row_waits_at_most_the_delay_while_other_rows_arrive() -> None:
    decide = Recorder()
    delay = 0.02

    async def ask() -> float:
        batcher = decide.batcher(max_batch=10**9, max_delay=delay)
        began = time.perf_counter()
        first = batcher.submit("k", 0.0)
        while not first.done():
            batcher.submit("k", 1.0)  # one more in each turn of the loop
            await asyncio.sleep(0)
        return time.perf_counter() - began

    taken = asyncio.run(ask())
    assert delay <= taken < 1.0
    assert len(decide.batches[0][1]) > 10


def test_a_single_row_does_not_wait_for_the_delay() -> None:
    async def ask() -> float:
        batcher = Recorder().batcher(max_delay=30.0)
        began = time.perf_counter()
        await batcher.submit("k", 1.0)
        return time.perf_counter() - began

    assert asyncio.run(ask()) < 5.0


def test_an_error_belongs_to_its_own_row() -> None:
    async def ask() -> list[Any]:
        batcher = Recorder().batcher()
        futures = [batcher.submit("k", value) for value in (1.0, -1.0, 2.0)]
        return list(await asyncio.gather(*futures, return_exceptions=True))

    first, second, third = asyncio.run(ask())
    assert (first, third) == (-1.0, -2.0)
    assert isinstance(second, ValueError)


def test_a_cancelled_row_does_not_stop_its_batch() -> None:
    async def ask() -> float:
        batcher = Recorder().batcher()
        gone, stays = batcher.submit("k", 1.0), batcher.submit("k", 2.0)
        gone.cancel()
        answer: float = await stays
        assert batcher.n_waiting == 0
        return answer

    assert asyncio.run(ask()) == -2.0


def test_slow_networks_run_in_a_thread_and_pending_rows_form_one_batch() -> None:
    decide = Recorder(seconds=0.1)

    async def ask() -> int:
        batcher = decide.batcher()
        await batcher.submit("k", 0.0)  # from now on it is known to be slow
        first = batcher.submit("k", 1.0)
        await asyncio.sleep(0.02)
        later = [batcher.submit("k", float(n)) for n in range(2, 7)]
        n_turns = 0
        while not first.done():
            await asyncio.sleep(0.001)
            n_turns += 1
        await asyncio.gather(*later)
        batcher.close()
        return n_turns

    n_turns = asyncio.run(ask())
    assert n_turns > 5
    assert [len(values) for _, values in decide.batches] == [1, 1, 5]
    assert len(decide.threads) == 2


def test_each_batch_row_gets_an_action_or_an_error() -> None:
    class Silent(Recorder):
        def decide_batch(self, key: Any, rows: Sequence[float]) -> Sequence[float]:
            return []

    async def ask() -> None:
        await Silent().batcher().submit("k", 1.0)

    with pytest.raises(ValueError, match="zip"):
        asyncio.run(asyncio.wait_for(ask(), 5.0))


# -- turns ------------------------------------------------------------------------------------------------------------


def test_requests_of_clients_are_served_in_turn() -> None:
    order: list[str] = []

    async def work(turns: Turns, client: str, units: int) -> None:
        async with turns.turn(client, units):
            order.append(client)
            await asyncio.sleep(0)

    async def ask() -> None:
        turns = Turns(4)
        async with turns.turn("holder", 1):
            tasks = [asyncio.ensure_future(work(turns, "flood", 4)) for _ in range(4)]
            tasks += [asyncio.ensure_future(work(turns, client, units)) for client in "ab" for units in (1, 99)]
            await asyncio.sleep(0)
            assert turns.waiting == {"flood": 16, "a": 5, "b": 5}
        await asyncio.gather(*tasks)
        assert turns.waiting == {}

    asyncio.run(ask())
    assert order == ["flood", "a", "b", "flood", "a", "b", "flood", "flood"]


def test_a_client_that_holds_its_share_leaves_room_for_others() -> None:
    async def ask() -> None:
        turns = Turns(4, share=2)
        async with turns.turn("slow", 2):
            waiting = asyncio.ensure_future(turns.turn("slow", 1).__aenter__())
            await asyncio.sleep(0)
            async with turns.turn("a", 1), turns.turn("b", 1):
                await asyncio.sleep(0)
                assert turns.waiting == {"slow": 1}
        await asyncio.wait_for(waiting, 5.0)

    asyncio.run(asyncio.wait_for(ask(), 5.0))


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 7), st.integers(0, 4), st.integers(0, 9)), max_size=30),
    st.integers(1, 5),
)
def test_a_capacity_is_never_exceeded_and_completely_released(
    requested: list[tuple[str, int, int, int]], share: int
) -> None:
    """Clients, units, passes of the loop that each holds them, and passes after which it is cancelled."""
    capacity, in_use, most, most_of_one = 5, Counter[str](), 0, 0

    async def work(turns: Turns, client: str, units: int, n_passes: int) -> None:
        nonlocal most, most_of_one
        async with turns.turn(client, units):
            in_use[client] += min(units, share)
            most, most_of_one = max(most, in_use.total()), max(most_of_one, in_use[client])
            try:
                for _ in range(n_passes):
                    await asyncio.sleep(0)
            finally:
                in_use[client] -= min(units, share)

    async def ask() -> None:
        turns = Turns(capacity, share)
        tasks = [asyncio.ensure_future(work(turns, client, units, n)) for client, units, n, _ in requested]
        for number in range(10):
            for task, (_, _, _, patience) in zip(tasks, requested, strict=True):
                if patience == number:
                    task.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait_for(work(turns, "d", capacity, 0), 5.0)
        assert turns.waiting == {}

    asyncio.run(ask())
    assert most <= capacity
    assert most_of_one <= share
