"""Hostile clients: endless input, unread responses, large requests, and their effect on other clients."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from benchmarks.serve_speed import attackers, beside, request
from maze.serve.app import Limits, Tokens
from maze.serve.client import PolicyClient, ServerError
from maze.serve.policies import Policies
from maze.serve.server import LARGEST_HEAD
from tests.serve.serving import ManyCartPoles, always, served, stacked

OBSERVATION = [0.01, -0.02, 0.03, 0.04]


@contextmanager
def connected(url: str, timeout: float = 10.0) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=timeout) as connection:
        yield connection


def send(connection: socket.socket, content: bytes) -> bool:
    """Whether the server takes it; it may close the connection in the middle."""
    try:
        connection.sendall(content)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def received(connection: socket.socket) -> bytes:
    """What arrives until the server closes the connection."""
    found = b""
    try:
        while data := connection.recv(1 << 16):
            found += data
    except ConnectionResetError:
        pass
    return found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served({"p": always(0)}) as (address, _):
        yield address


CHUNKED = b"POST /act HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
HEAD = b"GET /health HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.parametrize(
    "content",
    [
        HEAD + b"X: " + b"y" * LARGEST_HEAD + b"\r\n\r\n",
        HEAD + b"".join(b"X-%d: %s\r\n" % (number, b"y" * 1000) for number in range(120)) + b"\r\n",
        b"GET /" + b"y" * LARGEST_HEAD + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        CHUNKED + b"".join(b"X-%d: %s\r\n" % (number, b"y" * 1000) for number in range(120)) + b"\r\n",
        CHUNKED + b"X: " + b"y" * (LARGEST_HEAD + (256 << 10)),
        CHUNKED[:-3] + b"1;" + b"y" * (LARGEST_HEAD + (256 << 10)),
    ],
    ids=["header", "headers", "path", "trailers", "unfinished-trailer", "chunk-extension"],
)
def test_heads_trailers_and_chunk_extensions_end_at_the_limit(url: str, content: bytes) -> None:
    with connected(url) as connection:
        send(connection, content)
        answer = received(connection)
    # a connection that is closed while more arrives is reset, and its answer may be lost
    assert answer.startswith(b"HTTP/1.1 431") or not answer
    assert b"alive" not in answer
    assert httpx.get(f"{url}/health").status_code == 200


def test_a_head_below_the_limit_is_taken(url: str) -> None:
    assert httpx.get(f"{url}/health", headers={"x": "y" * (LARGEST_HEAD - 1000)}).status_code == 200


def test_trailers_are_no_headers() -> None:
    """A trailer that names a token or a type would otherwise be taken for the request's own."""
    body = json.dumps({"observation": OBSERVATION}).encode()
    sent = b"POST /act HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(body), body)
    with served({"p": always(0)}) as (url, _), connected(url) as connection:
        connection.sendall(sent + b"Content-Type: application/json\r\nConnection: close\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 415")


def test_requests_sent_ahead_are_bounded(url: str) -> None:
    one = HEAD + b"\r\n"
    with connected(url) as connection:
        connection.sendall(one * 5 + HEAD + b"Connection: close\r\n\r\n")
        assert received(connection).count(b"HTTP/1.1 200") == 6
    with connected(url) as connection:
        send(connection, one * 20_000)
        assert received(connection).count(b"HTTP/1.1 200") < 100


def test_a_client_that_does_not_read_is_disconnected() -> None:
    batch = request("/act", {"observations": [OBSERVATION] * 1024, "ranked": 2})
    with served({"p": always(0)}, limits=Limits(seconds=0.4)) as (url, application), connected(url) as connection:
        connection.sendall(batch * 16)  # answers of five megabytes, of which the system keeps a part
        n_idle = 0
        deadline = time.monotonic() + 20.0
        while n_idle < 25:  # in all of half a second
            assert time.monotonic() < deadline
            time.sleep(0.02)
            n_idle = 0 if application.n_running else n_idle + 1
        assert received(connection).count(b"HTTP/1.1 200") < 16
    with served({"p": always(0)}) as (url, _), connected(url) as connection:
        connection.sendall(batch * 9 + batch.replace(b"Host: a", b"Connection: close"))
        assert received(connection).count(b"HTTP/1.1 200") == 10, "a client that reads gets all of it"


@pytest.mark.parametrize("sent", [b"OPTIONS * HTTP/1.1", b"GET http://a/none HTTP/1.1", b"GET * HTTP/1.1"])
def test_targets_that_are_no_path_are_refused(url: str, sent: bytes) -> None:
    with connected(url) as connection:
        connection.sendall(sent + b"\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert received(connection).startswith((b"HTTP/1.1 404", b"HTTP/1.1 405"))


def test_a_target_of_a_tunnel_is_refused(url: str) -> None:
    with connected(url) as connection:
        connection.sendall(b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 4")
    assert httpx.get(f"{url}/health").status_code == 200


def test_batches_are_bounded(url: str) -> None:
    body = {"observations": [OBSERVATION] * 1000, "ranked": 100}
    refused = httpx.post(f"{url}/act", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid")
    assert len(httpx.post(f"{url}/act", json={**body, "ranked": 2}).json()["decisions"]) == 1000


def test_long_unknown_names_are_not_compared_with_known_ones(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def recorded(name: str, *arguments: Any, **more: Any) -> list[str]:
        compared.append(len(name))
        return []

    monkeypatch.setattr("maze.core.errors.get_close_matches", recorded)
    name = "x" * 500_000
    for body in ({name: 1}, {"observation": OBSERVATION, "policy": name}, {"seeed": 1}):
        answer = httpx.post(f"{url}/act", json=body)
        assert answer.status_code in (404, 422)
        assert len(answer.text) < 2000
    assert compared == [5]


@pytest.mark.parametrize("path", ["/act", "/sessions", "/decisions/00000000-1/outcome"])
def test_few_large_bodies_are_received_at_a_time(path: str) -> None:
    size = 200_000
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    with served({"p": always(0)}, limits=Limits(body_bytes=size)) as (url, _), ExitStack() as stack:
        connections = [stack.enter_context(connected(url)) for _ in range(40)]
        for connection in connections:  # all but the last byte: each of them may wait in the server's memory
            connection.sendall(head.encode() + b" " * (size - 1))
        connections[-1].settimeout(5.0)
        assert connections[-1].recv(4096).startswith(b"HTTP/1.1 503")
        assert httpx.get(f"{url}/health").status_code == 200


def test_slow_bodies_of_one_client_do_not_delay_those_of_another() -> None:
    head = b"POST /act HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer slow\r\nContent-Length: 1000000\r\n\r\n{"
    body = {"observations": [[0.012345678901234567] * 4] * 900}
    with served({"p": always(0)}, tokens=Tokens(["slow", "other"])) as (url, _), ExitStack() as stack:
        connections = [stack.enter_context(connected(url)) for _ in range(20)]
        for connection in connections:
            connection.sendall(head)
        time.sleep(0.2)
        answer = httpx.post(f"{url}/act", json=body, headers={"authorization": "Bearer other"}, timeout=30.0)
        assert answer.status_code == 200
        assert select.select(connections, [], [], 0)[0] == [], "the slow requests have not ended before"


def test_a_session_keeps_the_observations_of_a_bounded_number_of_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maze.serve.policies.MOST_ACTORS", 3)
    content = stacked(ManyCartPoles)
    with served({"p": content}) as (url, _), PolicyClient(url) as client, client.session() as session:
        for agent_id in (0, 1, 5, 1):
            session.act(OBSERVATION, agent_id=agent_id)
        with pytest.raises(ServerError, match="3 actors") as refused:
            session.act(OBSERVATION, agent_id=7)
        assert refused.value.status == 422
        session.act(OBSERVATION, agent_id=0)
        session.reset()
        session.act(OBSERVATION, agent_id=7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack",
    [
        attackers(4, CHUNKED, b"X: %s\r\n" % (b"y" * 1000)),
        attackers(100, HEAD + b"\r\n", reads=False),
        attackers(8, request("/act", {"observations": [OBSERVATION] * 1024})),
    ],
    ids=["trailers", "no-reading", "batches"],
)
def test_other_requests_are_served_during_a_slow_request(attack: Callable[[int, float], None]) -> None:
    """The benchmark `serve_speed.py --attacks` measures it on one core; here the machine may be busy."""
    with served({"p": always(0)}) as (url, _):
        taken = sorted(beside(int(url.rpartition(":")[2]), attack, 1.5))
    assert len(taken) > 20
    assert taken[int(0.9 * len(taken))] < 0.25


# -- housekeeping -----------------------------------------------------------------------------------------------------


def ready(url: str, status: int) -> dict[str, Any]:
    deadline = time.monotonic() + 10.0
    while (answer := httpx.get(f"{url}/ready")).status_code != status:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.02)
    found: dict[str, Any] = answer.json()
    return found


def test_failed_housekeeping_is_logged_repeated_and_reported_by_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with served({"p": always(0)}) as (url, _):
        ready(url, 200)
        with monkeypatch.context() as patched:

            def broken(self: Policies) -> None:
                raise RuntimeError("sessions cannot be counted")

            patched.setattr(Policies, "expire_sessions", broken)
            assert "housekeeping" in ready(url, 503)["reason"]
            assert httpx.get(f"{url}/health").status_code == 200
        ready(url, 200)
    assert "sessions cannot be counted" in caplog.text


def test_requests_end_in_time_while_housekeeping_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Policies, "expire_sessions", None)
    with served({"p": always(0)}, limits=Limits(seconds=0.4)) as (url, _), connected(url) as connection:
        connection.sendall(
            b"POST /act HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\nContent-Type: application/json\r\n\r\n{"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 504")
