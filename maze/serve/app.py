"""The decision server as a Starlette application: routes, limits, turns of clients, tokens, errors."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import re
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import resources
from time import perf_counter
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from maze.core.errors import MazeError, did_you_mean
from maze.serve.policies import Pending, Policies, checked_seed
from maze.serve.served import Options, RefusedError, as_json, invalid

_LOGGER = logging.getLogger(__name__)

Fields = Mapping[str, tuple[tuple[type, ...], str]]
"""The fields of a request: their types in JSON, and the types in words for messages. None is allowed for each."""
_INTEGER, _TEXT, _BOOL = ((int,), "a whole number"), ((str,), "a text"), ((bool,), "true or false")
_ANY: tuple[tuple[type, ...], str] = ((list, dict, str, int, float, bool), "JSON")
_OPTIONS: Fields = {"observation": _ANY, "agent_id": _INTEGER, "deterministic": _BOOL, "ranked": _INTEGER}
_ACT_IN_SESSION: Fields = {**_OPTIONS, "step": _INTEGER}
_BEGIN: Fields = {"seed": _INTEGER, "policy": _TEXT}
_RESET: Fields = {"seed": _INTEGER}
_CHANGE: Fields = {"weight": ((int, float), "a number"), "shadow": _BOOL}
_OUTCOME: Fields = {
    "reward": ((int, float), "a number"),
    "done": _BOOL,
    "truncated": _BOOL,
    "kpis": ((dict,), "an object of numbers"),
    "events": ((list,), "a list"),
}
_ONE = ("observation", "state", "episode_start", "episode", "step")
"""Fields of a request with one observation."""
_MANY = ("observations", "states", "episode_starts")
"""Fields of a request with several observations."""
_ACT: Fields = {
    **_OPTIONS,
    "episode": _TEXT,
    "step": _INTEGER,
    **_BEGIN,
    "state": ((dict,), "an object"),
    "episode_start": _BOOL,
    **dict.fromkeys(_MANY, _ANY),
}
_MOST_RANKED = 100
_MOST_RANKED_IN_ALL = 10_000
# Bytes of bodies that are parsed in any number at a time, and above which few are read at a time. Parsed JSON takes
# up to twenty times its size in memory; uvicorn reads 64 KiB before the application requests them.
_SMALL_BODY, _LARGE_BODY = 4 << 10, 64 << 10
_MOST_BODIES = 16  # large bodies in memory at a time; as many of each client may wait
_BYTES_LIKE_A_ROW = 1024  # bytes of JSON whose parsing takes about as long as a decision
_PAGE_UNITS = 32  # work for metrics or cards, in decisions
_SLICE = 16  # rows of batches that are decided before other requests have their turn


@dataclass(frozen=True)
class Limits:
    """Limits of requests.

    :param bundle_bytes: Maximum size of a bundle that an administrator sends.
    :param seconds: Time for the head of a request, from there to the start of its response, and for reading the
        response.
    :param n_waiting: Maximum number of pending decisions of each client; more are refused with status 503.
    :param n_observations: Maximum number of observations in one request.
    """

    body_bytes: int = 1 << 20
    bundle_bytes: int = 512 << 20
    seconds: float = 10.0
    n_waiting: int = 2048
    n_observations: int = 1024


class Tokens:
    """Bearer tokens, stored as hashes.

    :param acting: Tokens for decisions; none: decisions need no token.
    :param admin: Tokens for changes of policies, and decisions; none: policies cannot be changed.
    """

    def __init__(self, acting: Sequence[str] = (), admin: Sequence[str] = ()) -> None:
        self._acting = [_hashed(token.encode()) for token in acting]
        self._admin = [_hashed(token.encode()) for token in admin]

    def check(self, header: str, for_admin: bool) -> bytes:
        """Check the token of a request.

        :param header: `Authorization` of the request; empty: there is none.
        :param for_admin: Whether an administrator's token is required.
        :return: The token's hash, which identifies a client; empty where none is required.
        :raises RefusedError: With status 401 or 403.
        """
        if for_admin and not self._admin:
            raise RefusedError(403, "no_administrator", "No policy can be changed: set MAZE_SERVE_ADMIN_TOKEN.")
        if not for_admin and not self._acting:
            return b""
        scheme, _, token = header.partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise RefusedError(401, "no_token", "A token is required: send the header `Authorization: Bearer <token>`.")
        digest = _hashed(token.strip().encode())
        is_admin, is_acting = _is_among(digest, self._admin), _is_among(digest, self._acting)
        if is_admin or (is_acting and not for_admin):
            return digest
        if is_acting:
            raise RefusedError(403, "not_administrator", "This token allows decisions only; it cannot change policies.")
        raise RefusedError(401, "wrong_token", "The token is wrong.")


def _hashed(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _is_among(digest: bytes, known: Sequence[bytes]) -> bool:
    is_equal = [hmac.compare_digest(digest, each) for each in known]  # compares all, so that the time reveals nothing
    return any(is_equal)


class Turns:
    """Divide a capacity among clients: when it is exceeded, waiting clients are served in turn.

    Requests of one client are served in their order. A client with many requests, or a large one in many parts, delays
    another client's request by at most one of its own.

    :param capacity: Units in use at a time and in one pass of the event loop, such as rows or bytes.
    :param share: Units that one client may hold, so that slow requests of one leave room for others; None: all.
    """

    def __init__(self, capacity: int, share: int | None = None) -> None:
        self._capacity, self._share = capacity, capacity if share is None else share
        self._n_used = 0
        self._held: Counter[Hashable] = Counter()
        self._queues: OrderedDict[Hashable, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()
        self.waiting: Counter[Hashable] = Counter()
        """Waiting units by client."""

    @asynccontextmanager
    async def turn(self, client: Hashable, units: int) -> AsyncIterator[None]:
        """Wait for the client's turn, and hold the units within the block.

        :param client: The client.
        :param units: Units of the capacity; at most the client's share is held.
        """
        units = min(units, self._share)
        if any(map(self._has_share, self._queues)) or not self._take(client, units):
            await self._wait(client, units)
        try:
            yield
        finally:
            # in the next pass of the event loop, which bounds the work of each pass
            asyncio.get_running_loop().call_soon(self._give_back, client, units)

    def _has_share(self, client: Hashable) -> bool:
        """Return whether the first waiting request of a client needs no more than its share."""
        return self._held[client] + self._queues[client][0][0] <= self._share

    def _take(self, client: Hashable, units: int) -> bool:
        if self._n_used + units > self._capacity or self._held[client] + units > self._share:
            return False
        self._n_used += units
        self._held[client] += units
        return True

    async def _wait(self, client: Hashable, units: int) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, deque()).append((units, granted))
        self.waiting[client] += units
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():  # granted and cancelled in the same pass of the event loop
                self._give_back(client, units)
            raise
        finally:
            self.waiting[client] -= units
            if not self.waiting[client]:
                del self.waiting[client]

    def _give_back(self, client: Hashable, units: int) -> None:
        self._n_used -= units
        self._held[client] -= units
        if not self._held[client]:
            del self._held[client]
        while (first := next(filter(self._has_share, self._queues), None)) is not None:
            client, queue = first, self._queues[first]
            units, granted = queue[0]
            if not granted.cancelled():
                if not self._take(client, units):
                    return
                granted.set_result(None)
            queue.popleft()
            del self._queues[client]
            if queue:
                self._queues[client] = queue  # the last one now


class Application:
    """The decision server; belongs to one event loop.

    :param policies: Policies and sessions.
    :param limits: Limits of requests.
    :param tokens: Tokens of clients and administrators.
    """

    def __init__(self, policies: Policies, limits: Limits | None = None, tokens: Tokens | None = None) -> None:
        self.policies = policies
        self.limits = limits or Limits()
        self.tokens = tokens or Tokens()
        self.is_ready = False
        self.drift_seconds = 5.0
        """Seconds between two comparisons of the latest observations with the training."""
        self.n_running = 0
        """Requests without a response."""
        running = Gauge("maze_requests_running", "Requests without a response.", registry=policies.metrics.registry)
        running.set_function(lambda: self.n_running)
        # Requests for one decision that are processed at a time.
        self._singles = Turns(max(32, policies.settings.max_batch))
        self._batches = Turns(_SLICE)  # rows of batches, and other work of that size, that are processed at a time
        size = self.limits.body_bytes
        self._bodies = Turns(_MOST_BODIES * size, _MOST_BODIES * size // 2)
        self._contents = Turns(2 * size, size)
        self._failures: dict[str, str] = {}
        self._app = Starlette(
            routes=[
                Route("/act", self._act, methods=["POST"]),
                Route("/act/{step_key}", self._act, methods=["POST"]),
                Route("/sessions/{session}/act", self._act_in, methods=["POST"]),
                Route("/sessions/{session}/act/{step_key}", self._act_in, methods=["POST"]),
                Route("/decisions/{decision}/outcome", self._report, methods=["POST"]),
                Route("/sessions", self._begin, methods=["POST"]),
                Route("/sessions/{session}/reset", self._reset, methods=["POST"]),
                Route("/sessions/{session}", self._end, methods=["DELETE"]),
                Route("/health", _health),
                Route("/ready", self._ready),
                Route("/metrics", self._metrics),
                Route("/policies", self._list),
                Route("/policies/{name}", self._card),
                Route("/policies/{name}", self._swap, methods=["PUT"]),
                Route("/policies/{name}", self._change, methods=["PATCH"]),
                Route("/policies/{name}", self._remove, methods=["DELETE"]),
                Route("/openapi.json", self._open_api),
                Route("/", _index),
            ],
            exception_handlers={
                **dict.fromkeys((MazeError, HTTPException, ClientDisconnect), _on_error),
                Exception: _on_fault,
            },
            lifespan=self._lifespan,
        )
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, is_late = perf_counter(), 0, False
        task = asyncio.current_task()
        assert task is not None

        def cancel() -> None:
            nonlocal is_late
            is_late = task.cancel()

        # a cancel scope of anyio would take 8 us longer
        timer = asyncio.get_running_loop().call_later(self.limits.seconds, cancel)

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                timer.cancel()  # from here on, the connection has a limit of its own
                status = message["status"]
            await send(message)

        self.n_running += 1
        try:
            await self._app(scope, receive, counted)
        except asyncio.CancelledError:
            if not is_late:
                raise
            message = f"No response within {self.limits.seconds:g} s, which is the time limit."
            await _error(504, "time_limit", message, {"connection": "close"})(scope, receive, counted)
        finally:
            timer.cancel()
            self.n_running -= 1
            # paths contain identifiers, and arbitrary text of clients
            name = "".join(scope["path"].split("/", 2)[1:2])
            metrics = self.policies.metrics
            metrics.requests.labels(f"/{name}" if name in _NAMES else "/other", status).inc()
            metrics.seconds.observe(perf_counter() - began)

    # -- life cycle ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        housekeeping = asyncio.ensure_future(self._housekeeping())
        self.is_ready = True
        yield
        self.is_ready = False
        housekeeping.cancel()
        self.policies.close()

    async def _housekeeping(self) -> None:
        """Expire sessions and check drift repeatedly; each continues after a failure of the other."""
        next_check = 0.0
        while True:
            await self._do("expiry of sessions", self.policies.expire_sessions)
            if (now := perf_counter()) >= next_check:
                next_check = now + self.drift_seconds
                await self._do("drift of observations", self.policies.check_drift)
            await asyncio.sleep(0.25)

    async def _do(self, duty: str, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:
            self.policies.metrics.events.labels("failed_housekeeping").inc()
            if duty not in self._failures:
                _LOGGER.exception("Housekeeping (%s) failed; it is repeated, and /ready answers 503 meanwhile.", duty)
            self._failures[duty] = f"housekeeping ({duty}) failed with {type(error).__name__}, see the log"
        else:
            self._failures.pop(duty, None)

    # -- reading requests ---------------------------------------------------------------------------------------------

    def _client(self, request: Request, for_admin: bool = False) -> Hashable:
        """Check the token, and identify the client by it, or by its address."""
        token = self.tokens.check(request.headers.get("authorization", ""), for_admin)
        return token or (request.client and request.client.host)

    @asynccontextmanager
    async def _read(self, request: Request, client: Hashable) -> AsyncIterator[bytes]:
        """Read a body; within the block, memory for its content is reserved.

        :raises RefusedError: Too many requests are pending.
        """
        limits, size = self.limits, _announced(request, self.limits.body_bytes)
        _check_room(self.policies.n_waiting + self._singles.waiting[client], limits.n_waiting)
        if size <= _SMALL_BODY:
            yield await _body(request, limits.body_bytes, size)
            return
        _check_room(self._bodies.waiting[client] + size, _MOST_BODIES * limits.body_bytes)
        async with self._bodies.turn(client, size) if size > _LARGE_BODY else nullcontext():
            body = await _body(request, limits.body_bytes, size)
            async with self._contents.turn(client, len(body)):
                yield body

    def _turn(self, client: Hashable, body: bytes) -> AbstractAsyncContextManager[None]:
        """Wait for the client's turn to parse a body and decide on one observation in it."""
        if len(body) > _SMALL_BODY:
            return self._batches.turn(client, len(body) // _BYTES_LIKE_A_ROW)
        return self._singles.turn(client, 1)

    async def _fields(self, request: Request, client: Hashable, known: Fields) -> dict[str, Any]:
        """Return the fields of a request whose body may be empty."""
        async with self._read(request, client) as body, self._turn(client, body):
            return _parsed(request, body, known) if body else {}

    # -- deciding -----------------------------------------------------------------------------------------------------

    async def _act(self, request: Request) -> Response:
        client = self._client(request)
        async with self._read(request, client) as body:
            async with self._turn(client, body):
                fields = _parsed(request, body, _ACT)
                options, name = _options(fields, request), fields.get("policy")
                one, many = ([field for field in group if fields.get(field) is not None] for group in (_ONE, _MANY))
                if one and many:
                    raise invalid(f"`{one[0]}` and `{many[0]}` exclude each other.")
                if "observation" in fields:
                    policy = self.policies.chosen(name, options.bundle)
                    pending = self.policies.decide(policy, fields["observation"], options)
                    return _json(pending if isinstance(pending, dict) else await pending)
            observations = fields.get("observations")
            if type(observations) is not list or not 0 < len(observations) <= self.limits.n_observations:
                most = self.limits.n_observations
                raise invalid(f"Send an `observation`, or `observations`: a list of 1 to {most} of them.")
            n_rows = len(observations)
            if n_rows * options.ranked > _MOST_RANKED_IN_ALL:
                raise invalid(f"`ranked` {options.ranked} of {n_rows}: at most {_MOST_RANKED_IN_ALL} actions in all.")
            rows = _of_rows(options, fields, n_rows)
            policy = self.policies.chosen(name, next((each.bundle for each in rows if each.bundle), None))
            weight = 1 + options.ranked // 4 + len(body) // (n_rows * _BYTES_LIKE_A_ROW)
            size = max(1, _SLICE // weight)
            decisions: list[dict[str, Any]] = []
            for begin in range(0, n_rows, size):
                async with self._batches.turn(client, size * weight):
                    decided: list[Pending] = []
                    try:
                        for observation, row in zip(
                            observations[begin : begin + size], rows[begin : begin + size], strict=True
                        ):
                            decided.append(self.policies.decide(policy, observation, row))
                    except MazeError as error:
                        error.remark(f"This is observations[{begin + len(decided)}].")
                        raise
                    decisions += [row if isinstance(row, dict) else await row for row in decided]
            return _json({"decisions": decisions, "policy": policy.name, "bundle": policy.bundle.sha256})

    async def _act_in(self, request: Request) -> Response:
        client = self._client(request)
        session = self.policies.session(request.path_params["session"])
        async with self._read(request, client) as body, self._turn(client, body):
            fields = _parsed(request, body, _ACT_IN_SESSION)
            if "observation" not in fields:
                raise invalid("`observation` is missing.")
            return _json(await self.policies.decide_in(session, fields["observation"], _options(fields, request)))

    async def _report(self, request: Request) -> Response:
        client, decision = self._client(request), request.path_params["decision"]
        fields = await self._fields(request, client, _OUTCOME)
        self.policies.report(decision, fields)
        return _json({"decision": decision}, 202)

    async def _begin(self, request: Request) -> Response:
        fields = await self._fields(request, self._client(request), _BEGIN)
        return _json(self.policies.begin_session(fields.get("policy"), fields.get("seed")).described(), 201)

    async def _reset(self, request: Request) -> Response:
        client = self._client(request)
        session = self.policies.session(request.path_params["session"])
        fields = await self._fields(request, client, _RESET)
        await session.settled()
        session.reset(checked_seed(fields.get("seed")))
        return _json(session.described())

    async def _end(self, request: Request) -> Response:
        self._client(request)
        session = self.policies.session(request.path_params["session"])
        self.policies.end_session(session)
        return _json({"ended": session.id})

    # -- administration -----------------------------------------------------------------------------------------------

    async def _list(self, request: Request) -> Response:
        async with self._batches.turn(self._client(request), _PAGE_UNITS):
            return _json({"policies": [each.described() for each in self.policies]})

    async def _card(self, request: Request) -> Response:
        async with self._batches.turn(self._client(request), _PAGE_UNITS):
            return _json(self.policies.named(request.path_params["name"]).described())

    async def _swap(self, request: Request) -> Response:
        self._client(request, for_admin=True)
        content = await _body(request, self.limits.bundle_bytes, _announced(request, 0))
        ends = request.query_params.get("end_sessions") == "true"
        policy = await self.policies.put(request.path_params["name"], content, ends_sessions=ends)
        return _json(policy.described())

    async def _change(self, request: Request) -> Response:
        fields = await self._fields(request, self._client(request, for_admin=True), _CHANGE)
        policy = self.policies.change(request.path_params["name"], fields.get("weight"), fields.get("shadow"))
        return _json(policy.described())

    async def _remove(self, request: Request) -> Response:
        self._client(request, for_admin=True)
        return _json(self.policies.remove(request.path_params["name"]).described())

    # -- monitoring ---------------------------------------------------------------------------------------------------

    async def _ready(self, request: Request) -> Response:
        reason = "; ".join(self._failures.values()) if self.is_ready else "the server starts or stops"
        return _json({"status": "not ready", "reason": reason}, 503) if reason else _json({"status": "ready"})

    async def _open_api(self, request: Request) -> Response:
        async with self._batches.turn(self._client(request), _PAGE_UNITS):
            return _json(open_api([each.described() for each in self.policies]))

    async def _metrics(self, request: Request) -> Response:
        async with self._batches.turn(self._client(request), _PAGE_UNITS):
            text = generate_latest(self.policies.metrics.registry)
            return Response(text, media_type=CONTENT_TYPE_LATEST)


_NAMES = frozenset(("", "act", "sessions", "policies", "health", "ready", "metrics", "openapi.json"))


async def _health(request: Request) -> Response:
    return _json({"status": "alive"})


async def _index(request: Request) -> Response:
    return _page()


# -- responses --------------------------------------------------------------------------------------------------------


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(as_json(value), status, headers, "application/json")


def _error(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return _json({"error": {"code": code, "message": message}}, status, headers)


_HEADERS: Mapping[int, Mapping[str, str]] = {401: {"www-authenticate": "Bearer"}, 503: {"retry-after": "1"}}


async def _on_error(request: Request, error: Exception) -> Response:
    """Return the response to a request that cannot be answered; a connection with an unread body is closed."""
    if isinstance(error, RefusedError):
        status, code, message = error.status, error.code, str(error)
    elif isinstance(error, HTTPException):
        status, code = error.status_code, "wrong_method" if error.status_code == 405 else "unknown_path"
        message = f"There is no {request.method} of {request.scope['path']!r:.200}. /openapi.json lists all paths."
    elif isinstance(error, ClientDisconnect):
        status, code, message = 400, "disconnected", "The connection was closed before the request was complete."
    else:
        status, code, message = 422, type(error).__name__, str(error)
    headers = dict(_HEADERS.get(status, {}))
    if _announced(request, _SMALL_BODY + 1) > _SMALL_BODY:
        headers["connection"] = "close"
    return _error(status, code, message, headers)


async def _on_fault(request: Request, error: Exception) -> Response:
    _LOGGER.error("%s failed", request.scope["path"], exc_info=error)
    return _error(500, "internal_error", "The server failed at this request; see its log.")


# -- content of requests ----------------------------------------------------------------------------------------------


def _announced(request: Request, otherwise: int) -> int:
    """Return the length of a body as the request states it.

    :param otherwise: The length of one that is sent in chunks.
    """
    if "transfer-encoding" in request.headers:
        return otherwise
    return int(request.headers.get("content-length", 0))


def _check_room(n_waiting: int, most: int) -> None:
    if n_waiting >= most:
        raise RefusedError(503, "busy", "Too many decisions are pending. Send the request again in a second.")


async def _body(request: Request, most: int, announced: int) -> bytes:
    parts, size = [], announced
    if size <= most:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                break
            parts.append(part)
    if size > most:
        raise RefusedError(413, "too_large", f"The body is larger than {most} bytes, which is the limit.")
    return b"".join(parts)


def _parsed(request: Request, body: bytes, known: Fields) -> dict[str, Any]:
    """Return the fields of a request, whose body is a JSON object."""
    kind = request.headers.get("content-type", "").partition(";")[0]
    if kind.strip().lower() != "application/json":  # also: pages of other origins cannot send this type
        raise RefusedError(415, "no_json", "Send JSON, with the header `Content-Type: application/json`.")
    try:
        fields = orjson.loads(body)
    except (orjson.JSONDecodeError, RecursionError) as error:
        raise RefusedError(400, "malformed_json", f"The body is not valid JSON: {error}.") from None
    if type(fields) is not dict:
        raise RefusedError(400, "malformed_json", f"The body is a JSON {type(fields).__name__}, expected an object.")
    for name, value in fields.items():
        if name not in known:
            names = ", ".join(sorted(known))
            raise invalid(f"`{name:.100}` is unknown.{did_you_mean(name, known)} Known: {names}.")
        kinds, meaning = known[name]
        if value is not None and type(value) not in kinds:
            raise invalid(f"`{name}` must be {meaning}, found {value!r:.100}.")
    return fields


def _options(fields: Mapping[str, Any], request: Request) -> Options:
    ranked = fields.get("ranked") or 0
    if not 0 <= ranked <= _MOST_RANKED:
        raise invalid(f"`ranked` must lie between 0 and {_MOST_RANKED}, found {ranked}.")
    if (fields.get("step") or 0) < 0:
        raise invalid(f"`step` is the number of the decision in its episode, from 0; found {fields['step']}.")
    return Options(
        step_key=request.path_params.get("step_key"),
        agent_id=fields.get("agent_id"),
        deterministic=fields.get("deterministic") is not False,
        ranked=ranked,
        seed=fields.get("seed"),
        step=fields.get("step"),
        episode=fields.get("episode") or "",
        state=fields.get("state"),
        episode_start=bool(fields.get("episode_start")),
    )


def _of_rows(options: Options, fields: Mapping[str, Any], n_rows: int) -> list[Options]:
    """Return the options of each of several observations, which have their own hidden states and seeds."""
    states, starts = fields.get("states"), fields.get("episode_starts")
    for name, rows in (("states", states), ("episode_starts", starts)):
        if rows is not None and (type(rows) is not list or len(rows) != n_rows):
            raise invalid(f"`{name}` must be a list with one entry for each of the {n_rows} `observations`.")
    if any(type(start) is not bool for start in starts or ()):
        raise invalid("`episode_starts` must hold true or false for each observation.")
    seeds = [None] * n_rows if options.seed is None else range(options.seed, options.seed + n_rows)
    rows = zip(seeds, states or [None] * n_rows, starts or [False] * n_rows, strict=True)
    return [options._replace(seed=seed, state=state, episode_start=start) for seed, state, start in rows]


@cache
def _page() -> Response:
    """Return the HTML page, with headers that restrict a browser to what is in it."""
    page = (resources.files("maze.serve") / "page.html").read_bytes()
    sources = []
    for tag in ("script", "style"):
        found = re.search(rf"<{tag}>(.*?)</{tag}>".encode(), page, re.DOTALL)
        assert found is not None, "a part of the page"
        sources.append(f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(found[1]).digest()).decode()}'")
    policy = (
        f"default-src 'none'; {'; '.join(sources)}; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    others = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    return HTMLResponse(page, headers={"content-security-policy": policy, **others})


# -- the OpenAPI description, with the spaces of the policies ----------------------------------------------------------

_OBSERVATION = json.dumps({"$ref": "#/components/schemas/Observation"})
_ACTING = ("/act", "/sessions/{session}/act")  # paths that exist once for each sub-step


def open_api(policies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Describe the endpoints of a server.

    :param policies: As :meth:`maze.serve.served.Served.described` returns them.
    """
    document: dict[str, Any] = json.loads((resources.files("maze.serve") / "openapi.json").read_bytes())
    acting = {path: json.dumps(document["paths"].pop(path)) for path in _ACTING}
    steps: dict[str, list[dict[str, Any]]] = {}
    for policy in policies:
        for step in policy["steps"]:
            end = f"/{step['step']}" if len(policy["steps"]) > 1 else ""
            steps.setdefault(end, []).append(_observation(step))
    for end, schemas in steps.items():
        schema = schemas[0] if all(each == schemas[0] for each in schemas) else {"anyOf": schemas}
        for path, text in acting.items():
            document["paths"][path + end] = json.loads(text.replace(_OBSERVATION, json.dumps(schema)))
    return document


def _observation(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an observation of the raw environment."""
    entries = {name: _entry(space) for name, space in step["observation"].items()}
    if step["observation_kind"] == "single":
        return next(iter(entries.values()))
    if step["observation_kind"] == "tuple":
        return {"type": "array", "prefixItems": list(entries.values()), "minItems": len(entries)}
    return {"type": "object", "properties": entries, "required": list(entries)}


def _entry(space: Mapping[str, Any]) -> dict[str, Any]:
    dtype = str(space.get("dtype", "float32"))
    schema: dict[str, Any] = {"type": "integer" if "int" in dtype else "boolean" if dtype == "bool" else "number"}
    for size in reversed(space.get("shape", ())):
        schema = {"type": "array", "items": schema, "minItems": size, "maxItems": size}
    return schema
