"""The decision server as a Starlette application: routes, limits, tokens, errors."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
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
from maze.serve.batching import Turns
from maze.serve.openapi import open_api
from maze.serve.policies import Policies, checked_seed
from maze.serve.served import Carried, Options, RefusedError, as_json

_LOGGER = logging.getLogger(__name__)

_ACT_IN_SESSION = frozenset(("observation", "agent_id", "deterministic", "ranked", "step"))
_ACT = frozenset(
    ("observation", "observations", "agent_id", "deterministic", "ranked", "seed", "policy", "state", "states",
     "episode_start", "episode_starts")
)  # fmt: skip
_MOST_RANKED = 100
_MOST_RANKED_IN_ALL = 10_000
_SMALL_BODY, _LARGE_BODY = 4 << 10, 64 << 10
"""Bytes of bodies that are parsed in any number at a time, and above which few are read at a time. What JSON becomes in
memory is up to twenty times as large; uvicorn reads 64 KiB before they are wanted."""
_MOST_BODIES = 16
"""Large bodies in memory at a time; as many of each client may wait."""
_BYTES_LIKE_A_ROW = 1024
"""Reading so many bytes of JSON takes about as long as a decision."""
_PAGE_UNITS = 32
"""Work for a page of metrics or cards, in decisions."""
_HOUSEKEEPING_SECONDS = 30.0
"""Without housekeeping for so long the server is not ready."""


@dataclass(frozen=True)
class Limits:
    """What the service takes at most."""

    body_bytes: int = 1 << 20
    bundle_bytes: int = 512 << 20
    """Of a bundle that an administrator sends."""
    seconds: float = 10.0
    """For the head of a request, from there to the beginning of its answer, and for reading the answer."""
    n_waiting: int = 2048
    """Decisions that wait at a time, for each client; more are refused with status 503."""
    n_observations: int = 1024
    """In one request."""


class Tokens:
    """Bearer tokens, of which only hashes are kept.

    :param acting: Allow decisions; none: decisions need no token.
    :param admin: Allow changes of policies, and decisions; none: policies cannot be changed.
    """

    def __init__(self, acting: Sequence[str] = (), admin: Sequence[str] = ()) -> None:
        self._acting = [_hashed(token.encode()) for token in acting]
        self._admin = [_hashed(token.encode()) for token in admin]

    def check(self, header: str, for_admin: bool) -> bytes:
        """Check the token of a request.

        :param header: `Authorization` of the request; empty: it has none.
        :param for_admin: Whether the administrator's is needed.
        :return: The token's hash, which identifies a client; empty where none is needed.
        :raises RefusedError: With status 401 or 403.
        """
        if for_admin and not self._admin:
            raise RefusedError(
                403,
                "no_administrator",
                "Policies cannot be changed: the server was started without a token for it (MAZE_SERVE_ADMIN_TOKEN or "
                "--admin-token-file).",
            )
        if not for_admin and not self._acting:
            return b""
        scheme, _, token = header.partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise RefusedError(401, "no_token", "This needs a token: send the header `Authorization: Bearer <token>`.")
        digest = _hashed(token.strip().encode())
        is_admin = _is_among(digest, self._admin)
        if is_admin or (not for_admin and _is_among(digest, self._acting)):
            return digest
        if for_admin and _is_among(digest, self._acting):
            raise RefusedError(403, "not_administrator", "This token may ask for decisions, and not change policies.")
        raise RefusedError(401, "wrong_token", "The token is wrong.")


def _hashed(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _is_among(digest: bytes, known: Sequence[bytes]) -> bool:
    found = False
    for each in known:
        found |= hmac.compare_digest(digest, each)  # all of them: the time says nothing
    return found


class Application:
    """The service; made for one event loop.

    :param policies: What decides.
    :param limits: What is refused.
    :param tokens: Which tokens are needed.
    """

    def __init__(self, policies: Policies, limits: Limits | None = None, tokens: Tokens | None = None) -> None:
        self.policies = policies
        self.limits = limits or Limits()
        self.tokens = tokens or Tokens()
        self.is_ready = False
        self.drift_seconds = 5.0
        """Time between two comparisons of the latest observations with the training."""
        self.n_running = 0
        """Requests without an answer."""
        running = Gauge("maze_requests_running", "Requests without an answer.", registry=policies.metrics.registry)
        running.set_function(lambda: self.n_running)
        self._bodies = Turns(_MOST_BODIES * self.limits.body_bytes)
        self._contents = Turns(2 * self.limits.body_bytes)
        self._troubles: dict[str, str] = {}
        self._kept_house = perf_counter()
        self._late: set[asyncio.Task[Any]] = set()
        self._app = Starlette(
            routes=[
                Route("/act", self._act, methods=["POST"]),
                Route("/act/{step_key}", self._act, methods=["POST"]),
                Route("/sessions/{session}/act", self._act_in, methods=["POST"]),
                Route("/sessions/{session}/act/{step_key}", self._act_in, methods=["POST"]),
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
                MazeError: _on_error,
                HTTPException: _on_no_route,
                ClientDisconnect: _on_disconnect,
                Exception: _on_fault,
            },
            lifespan=self._lifespan,
        )
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = perf_counter(), 0
        task = asyncio.current_task()
        assert task is not None
        timer = asyncio.get_running_loop().call_later(self.limits.seconds, self._on_time, task)

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
            if task not in self._late:
                raise
            message = f"No answer after {self.limits.seconds:g} s; this is the time limit."
            await _error(504, "time_limit", message, {"connection": "close"})(scope, receive, counted)
        finally:
            timer.cancel()
            self._late.discard(task)
            self.n_running -= 1
        # paths hold identifiers, and whatever else clients send
        name = "".join(scope["path"].split("/", 2)[1:2])
        metrics = self.policies.metrics
        metrics.requests.labels(f"/{name}" if name in _NAMES else "/other", status).inc()
        metrics.seconds.observe(perf_counter() - began)

    def _on_time(self, task: asyncio.Task[Any]) -> None:
        self._late.add(task)
        task.cancel()

    # -- life -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        housekeeping = asyncio.ensure_future(self._keep_house())
        self.is_ready = True
        yield
        self.is_ready = False
        housekeeping.cancel()
        self.policies.close()

    async def _keep_house(self) -> None:
        """End unused sessions and compare observations with the training, again and again, whatever fails."""
        next_look = 0.0
        while True:
            await self._do("expiry of sessions", self.policies.expire_sessions)
            if (now := perf_counter()) >= next_look:
                next_look = now + self.drift_seconds
                await self._do("drift of observations", self.policies.look_at_drift)
            self._kept_house = perf_counter()
            await asyncio.sleep(0.25)

    async def _do(self, duty: str, work: Callable[[], Awaitable[None] | None]) -> None:
        try:
            waited = work()
            if waited is not None:
                await waited
        except Exception as error:
            self.policies.metrics.events.labels("failed_housekeeping").inc()
            if duty not in self._troubles:
                _LOGGER.exception(
                    "Housekeeping (%s) failed; it is tried again, and /ready answers 503 meanwhile.", duty
                )
            self._troubles[duty] = f"housekeeping ({duty}) failed with {type(error).__name__}, see the log"
        else:
            self._troubles.pop(duty, None)

    # -- reading requests ---------------------------------------------------------------------------------------------

    def _client(self, request: Request, for_admin: bool = False) -> Hashable:
        """Check the token, and identify the client: by it, or by its address."""
        token = self.tokens.check(request.headers.get("authorization", ""), for_admin)
        return token or (request.client and request.client.host)

    @asynccontextmanager
    async def _read(self, request: Request, client: Hashable) -> AsyncIterator[bytes]:
        """Read a body, and hold a place in the memory for what is in it within the block.

        :raises RefusedError: Too much waits already.
        """
        limits, size = self.limits, _announced(request, self.limits.body_bytes)
        _check_room(self.policies.n_waiting + self.policies.singles.waiting[client], limits.n_waiting)
        if size <= _SMALL_BODY:
            yield await _body(request, limits.body_bytes, size)
            return
        _check_room(self._bodies.waiting[client] + size, _MOST_BODIES * limits.body_bytes)
        async with self._bodies.turn(client, size) if size > _LARGE_BODY else nullcontext():
            body = await _body(request, limits.body_bytes, size)
            async with self._contents.turn(client, len(body)):
                yield body

    def _turn(self, client: Hashable, body: bytes) -> AbstractAsyncContextManager[None]:
        """Wait for the client's turn to have a body parsed, and an observation in it decided."""
        if len(body) > _SMALL_BODY:
            return self.policies.batches.turn(client, len(body) // _BYTES_LIKE_A_ROW)
        return self.policies.singles.turn(client, 1)

    async def _fields(self, request: Request, may_be_empty: bool = False) -> dict[str, Any]:
        most = self.limits.body_bytes
        return _parsed(request, await _body(request, most, _announced(request, 0)), may_be_empty)

    # -- deciding -----------------------------------------------------------------------------------------------------

    async def _act(self, request: Request) -> Response:
        client = self._client(request)
        async with self._read(request, client) as body:
            async with self._turn(client, body):
                fields = _parsed(request, body)
                _check_names(fields, _ACT)
                options = _options(fields, request)
                name = _optional(fields, "policy", str, "a text")
                seed = _optional(fields, "seed", int, "a whole number")
                if "observation" in fields:
                    begins = _optional(fields, "episode_start", bool, "true or false")
                    carried = Carried(_optional(fields, "state", dict, "an object"), bool(begins))
                    policy = self.policies.chosen(name, carried.bundle)
                    return _json(await self.policies.decide(policy, fields["observation"], options, seed, carried))
            observations = fields.get("observations")
            if type(observations) is not list or not 0 < len(observations) <= self.limits.n_observations:
                most = self.limits.n_observations
                raise _invalid(f"Send an `observation`, or `observations`: a list of 1 to {most} of them.")
            n_rows = len(observations)
            if n_rows * options.ranked > _MOST_RANKED_IN_ALL:
                raise _invalid(f"{n_rows} observations with `ranked` {options.ranked}: at most {_MOST_RANKED_IN_ALL} "
                               "ranked actions are given in all.")  # fmt: skip
            of_each = _carried(fields, n_rows)
            policy = self.policies.chosen(name, next((each.bundle for each in of_each if each.bundle), None))
            weight = 1 + options.ranked // 4 + len(body) // (n_rows * _BYTES_LIKE_A_ROW)
            decisions = await self.policies.decide_many(policy, observations, options, seed, of_each, client, weight)
            return _json({"decisions": decisions, "policy": policy.name, "bundle": policy.bundle.sha256})

    async def _act_in(self, request: Request) -> Response:
        client = self._client(request)
        session = self.policies.session(request.path_params["session"])
        async with self._read(request, client) as body, self._turn(client, body):
            fields = _parsed(request, body)
            _check_names(fields, _ACT_IN_SESSION)
            if "observation" not in fields:
                raise _invalid("`observation` is missing.")
            options = _options(fields, request)
            step = _optional(fields, "step", int, "a whole number")
            return _json(await self.policies.decide_in(session, fields["observation"], options, step))

    async def _begin(self, request: Request) -> Response:
        self._client(request)
        fields = await self._fields(request, may_be_empty=True)
        _check_names(fields, frozenset(("seed", "policy")))
        name = _optional(fields, "policy", str, "a text")
        session = self.policies.begin_session(name, _optional(fields, "seed", int, "a whole number"))
        return _json(session.described(), 201)

    async def _reset(self, request: Request) -> Response:
        self._client(request)
        session = self.policies.session(request.path_params["session"])
        fields = await self._fields(request, may_be_empty=True)
        _check_names(fields, frozenset(("seed",)))
        await session.settled()
        session.reset(checked_seed(_optional(fields, "seed", int, "a whole number")))
        return _json(session.described())

    async def _end(self, request: Request) -> Response:
        self._client(request)
        session = self.policies.session(request.path_params["session"])
        self.policies.end_session(session)
        return _json({"ended": session.id})

    # -- administration -----------------------------------------------------------------------------------------------

    async def _list(self, request: Request) -> Response:
        async with self.policies.batches.turn(self._client(request), _PAGE_UNITS):
            return _json({"policies": [each.described() for each in self.policies]})

    async def _card(self, request: Request) -> Response:
        async with self.policies.batches.turn(self._client(request), _PAGE_UNITS):
            return _json(self.policies.named(request.path_params["name"]).described())

    async def _swap(self, request: Request) -> Response:
        self._client(request, for_admin=True)
        content = await _body(request, self.limits.bundle_bytes, _announced(request, 0))
        ends = request.query_params.get("end_sessions") == "true"
        policy = await self.policies.put(request.path_params["name"], content, ends_sessions=ends)
        return _json(policy.described())

    async def _change(self, request: Request) -> Response:
        self._client(request, for_admin=True)
        fields = await self._fields(request)
        _check_names(fields, frozenset(("weight", "shadow")))
        weight = _optional(fields, "weight", (int, float), "a number")
        is_shadow = _optional(fields, "shadow", bool, "true or false")
        return _json(self.policies.change(request.path_params["name"], weight, is_shadow).described())

    async def _remove(self, request: Request) -> Response:
        self._client(request, for_admin=True)
        return _json(self.policies.remove(request.path_params["name"]).described())

    # -- monitoring ---------------------------------------------------------------------------------------------------

    async def _ready(self, request: Request) -> Response:
        reason = "; ".join(self._troubles.values())
        if not self.is_ready:
            reason = "the server starts or stops"
        elif perf_counter() > self._kept_house + _HOUSEKEEPING_SECONDS:
            reason = f"no housekeeping for more than {_HOUSEKEEPING_SECONDS:g} s"
        if reason:
            return _json({"status": "not ready", "reason": reason}, 503)
        return _json({"status": "ready"})

    async def _open_api(self, request: Request) -> Response:
        async with self.policies.batches.turn(self._client(request), _PAGE_UNITS):
            return _json(open_api([each.described() for each in self.policies]))

    async def _metrics(self, request: Request) -> Response:
        async with self.policies.batches.turn(self._client(request), _PAGE_UNITS):
            text = generate_latest(self.policies.metrics.registry)
            return Response(text, media_type=CONTENT_TYPE_LATEST)


_NAMES = frozenset(("", "act", "sessions", "policies", "health", "ready", "metrics", "openapi.json"))


async def _health(request: Request) -> Response:
    return _json({"status": "alive"})


async def _index(request: Request) -> Response:
    return _page()


# -- answers ----------------------------------------------------------------------------------------------------------


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(as_json(value), status, headers, "application/json")


def _error(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return _json({"error": {"code": code, "message": message}}, status, headers)


_HEADERS: Mapping[int, Mapping[str, str]] = {401: {"www-authenticate": "Bearer"}, 503: {"retry-after": "1"}}


def _refusal(request: Request, status: int, code: str, message: str) -> Response:
    headers = dict(_HEADERS.get(status, {}))
    if _announced(request, _SMALL_BODY + 1) > _SMALL_BODY:
        headers["connection"] = "close"  # the rest of the body is not read
    return _error(status, code, message, headers)


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RefusedError):
        return _refusal(request, error.status, error.code, str(error))
    return _refusal(request, 422, type(error).__name__, str(error))


async def _on_no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "the key of the handler"
    path = request.scope["path"]
    if error.status_code == 405:
        return _refusal(request, 405, "wrong_method", f"{request.method} is not possible at {path!r:.200}.")
    message = f"There is nothing at {path!r:.200}. /openapi.json lists what there is."
    return _refusal(request, 404, "unknown_path", message)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return _error(400, "disconnected", "The connection was closed before the request was complete.")


async def _on_fault(request: Request, error: Exception) -> Response:
    _LOGGER.error("%s failed", request.scope["path"], exc_info=error)
    return _error(500, "internal_error", "The server failed at this request; its log says why.")


# -- what requests hold -----------------------------------------------------------------------------------------------


def _announced(request: Request, otherwise: int) -> int:
    """The length of a body as the request states it.

    :param otherwise: The length of one that is sent in chunks.
    """
    if "transfer-encoding" in request.headers:
        return otherwise
    return int(request.headers.get("content-length", 0))


def _check_room(n_waiting: int, most: int) -> None:
    if n_waiting >= most:
        raise RefusedError(503, "busy", "Too many decisions wait already. Send the request again in a second.")


async def _body(request: Request, most: int, announced: int) -> bytes:
    if announced > most:
        raise _too_large(most)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise _too_large(most)
        parts.append(part)
    return b"".join(parts)


def _parsed(request: Request, body: bytes, may_be_empty: bool = False) -> dict[str, Any]:
    """The body of a request, which has to be a JSON object."""
    if not body and may_be_empty:
        return {}
    kind = request.headers.get("content-type", "").partition(";")[0]
    if kind.strip().lower() != "application/json":  # also: pages of other origins cannot send this type
        raise RefusedError(415, "no_json", "Send JSON, with the header `Content-Type: application/json`.")
    try:
        fields = orjson.loads(body)
    except (orjson.JSONDecodeError, RecursionError) as error:
        raise RefusedError(400, "malformed_json", f"The body is no JSON: {error}.") from None
    if type(fields) is not dict:
        raise RefusedError(400, "malformed_json", f"The body is a JSON {type(fields).__name__}, expected an object.")
    return fields


def _check_names(fields: Mapping[str, Any], known: frozenset[str]) -> None:
    if not fields.keys() <= known:
        unknown = sorted(fields.keys() - known)[0]
        raise _invalid(f"`{unknown:.100}` is unknown.{did_you_mean(unknown, known)} Known: {', '.join(sorted(known))}.")


def _optional(fields: Mapping[str, Any], name: str, kind: type | tuple[type, ...], meaning: str) -> Any:
    value = fields.get(name)
    if value is None or (isinstance(value, kind) and (type(value) is not bool or kind is bool)):
        return value
    raise _invalid(f"`{name}` must be {meaning}, got {value!r:.100}.")


def _options(fields: Mapping[str, Any], request: Request) -> Options:
    agent_id = _optional(fields, "agent_id", int, "a whole number")
    deterministic = _optional(fields, "deterministic", bool, "true or false")
    ranked = _optional(fields, "ranked", int, "a whole number")
    if ranked is not None and not 0 <= ranked <= _MOST_RANKED:
        raise _invalid(f"`ranked` must lie between 0 and {_MOST_RANKED}, got {ranked}.")
    return Options(request.path_params.get("step_key"), agent_id or 0, deterministic is not False, ranked or 0)


def _carried(fields: Mapping[str, Any], n_rows: int) -> list[Carried]:
    """What a request brings along for each of several observations."""
    states, starts = fields.get("states"), fields.get("episode_starts")
    for name, rows in (("states", states), ("episode_starts", starts)):
        if rows is not None and (type(rows) is not list or len(rows) != n_rows):
            raise _invalid(f"`{name}` must be a list with one entry for each of the {n_rows} `observations`.")
    if any(type(start) is not bool for start in starts or ()):
        raise _invalid("`episode_starts` must hold true or false for each observation.")
    return [Carried(*row) for row in zip(states or [None] * n_rows, starts or [False] * n_rows, strict=True)]


def _invalid(message: str) -> RefusedError:
    return RefusedError(422, "invalid", message)


def _too_large(most: int) -> RefusedError:
    return RefusedError(413, "too_large", f"The body is larger than {most} bytes, which is the limit.")


@cache
def _page() -> Response:
    """The page, with headers by which a browser runs and loads nothing but what is in it."""
    page = (resources.files("maze.serve") / "page.html").read_bytes()

    def hash_of(tag: bytes) -> str:
        content = page.split(b"<%s>" % tag)[1].split(b"</%s>" % tag)[0]
        return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"

    policy = (
        f"default-src 'none'; script-src {hash_of(b'script')}; style-src {hash_of(b'style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    others = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    return HTMLResponse(page, headers={"content-security-policy": policy, **others})
