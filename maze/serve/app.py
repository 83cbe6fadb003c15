"""The service as an ASGI application: what may be asked, of whom, and what is answered."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from time import perf_counter
from typing import Any
from urllib.parse import parse_qs

import orjson

from maze.core.errors import MazeError, did_you_mean
from maze.serve.metrics import SECONDS, Exposition, Histogram
from maze.serve.openapi import open_api
from maze.serve.policies import Policies, ServedSession, checked_seed
from maze.serve.served import Carried, Options, RefusedError, as_json

_LOGGER = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_JSON, _TEXT, _HTML = b"application/json", b"text/plain; version=0.0.4; charset=utf-8", b"text/html; charset=utf-8"
_ACT_IN_SESSION = frozenset(("observation", "agent_id", "deterministic", "ranked", "step"))
_ACT = frozenset(
    ("observation", "observations", "agent_id", "deterministic", "ranked", "seed", "policy", "state", "states",
     "episode_start", "episode_starts")
)  # fmt: skip
_MOST_RANKED = 100


@dataclass(frozen=True)
class Limits:
    """What the service takes at most."""

    body_bytes: int = 1 << 20
    bundle_bytes: int = 512 << 20
    """Of a bundle that an administrator sends."""
    seconds: float = 10.0
    """For a request, from its first byte to its answer."""
    n_waiting: int = 2048
    """Decisions that wait at a time; more are refused with status 503."""
    n_observations: int = 1024
    """In one request."""


class Tokens:
    """Bearer tokens, of which only hashes are kept.

    :param acting: May ask for decisions; none: everybody may.
    :param admin: May change policies, and ask for decisions; none: nobody may change anything.
    """

    def __init__(self, acting: Sequence[str] = (), admin: Sequence[str] = ()) -> None:
        self._acting = [_hashed(token.encode()) for token in acting]
        self._admin = [_hashed(token.encode()) for token in admin]

    def check(self, header: bytes | None, for_admin: bool) -> None:
        """Lets pass who has the token.

        :param header: `Authorization` of the request.
        :param for_admin: Whether the administrator's is needed.
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
            return
        scheme, _, token = (header or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not token:
            raise RefusedError(401, "no_token", "This needs a token: send the header `Authorization: Bearer <token>`.")
        digest = _hashed(token.strip())
        is_admin = _is_among(digest, self._admin)
        if is_admin or (not for_admin and _is_among(digest, self._acting)):
            return
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


@dataclass
class _Counts:
    requests: dict[tuple[str, int], int] = field(default_factory=dict)
    seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))


class Application:
    """Answers HTTP requests; made for one event loop.

    :param policies: What decides.
    :param limits: What is refused.
    :param tokens: Who may ask.
    """

    def __init__(self, policies: Policies, limits: Limits | None = None, tokens: Tokens | None = None) -> None:
        self.policies = policies
        self.limits = limits or Limits()
        self.tokens = tokens or Tokens()
        self.is_ready = False
        self.drift_seconds = 5.0
        """Time between two looks at how observations have changed."""
        self._counts = _Counts()
        self._running: dict[asyncio.Task[Any], float] = {}
        self._late: set[asyncio.Task[Any]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    # -- life -------------------------------------------------------------------------------------------------------

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        housekeeping = asyncio.ensure_future(self._keep_house())
        self.is_ready = True
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self.is_ready = False
        housekeeping.cancel()
        self.policies.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _keep_house(self) -> None:
        """Ends requests that take too long, and sessions that nobody asks any more."""
        next_look = 0.0
        while True:
            await asyncio.sleep(min(0.25, self.limits.seconds / 4))
            now = perf_counter()
            for task, began in list(self._running.items()):
                if began < now - self.limits.seconds and task not in self._late:
                    self._late.add(task)
                    task.cancel()
            self.policies.expire_sessions()
            if now >= next_look:
                next_look = now + self.drift_seconds
                await self.policies.look_at_drift()

    # -- one request --------------------------------------------------------------------------------------------------

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = perf_counter()
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = began
        extra: list[tuple[bytes, bytes]] = []
        path = scope["path"]
        try:
            status, kind, body = await self._routed(scope, path.split("/"), receive)
        except _GoneError:
            return
        except BaseException as error:
            status, body, extra = self._failure(error, task, path)
            kind = _JSON
        finally:
            del self._running[task]
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *extra]
        if kind is _HTML:
            headers += _page()[1]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body if scope["method"] != "HEAD" else b""})
        # paths hold identifiers, and anything else that somebody may have asked for
        name = path.split("/", 2)[1]
        place = (name if name in _PLACES or name in _ROOMS else "other", status)
        self._counts.requests[place] = self._counts.requests.get(place, 0) + 1
        self._counts.seconds.observe(perf_counter() - began)

    def _failure(
        self, error: BaseException, task: asyncio.Task[Any], path: str
    ) -> tuple[int, bytes, list[tuple[bytes, bytes]]]:
        """What is answered where there is no answer; what is nobody's business stays in the log."""
        extra: list[tuple[bytes, bytes]] = []
        if isinstance(error, asyncio.CancelledError):
            if task not in self._late:
                raise error
            self._late.discard(task)
            error = RefusedError(
                504, "time_limit", f"No answer after {self.limits.seconds:g} s; this is the time limit."
            )
            extra = [(b"connection", b"close")]
        if isinstance(error, RefusedError):
            status, code, message = error.status, error.code, str(error)
            if status == 401:
                extra = [(b"www-authenticate", b"Bearer")]
            elif status == 413:
                extra = [(b"connection", b"close")]  # the rest of the body is not read
            elif status == 503:
                extra = [(b"retry-after", b"1")]
        elif isinstance(error, MazeError):
            status, code, message = 422, type(error).__name__, str(error)
        elif isinstance(error, Exception):
            _LOGGER.error("%s failed", path, exc_info=error)
            status, code = 500, "internal_error"
            message = "The server failed at this request; its log says why."
        else:
            raise error
        return status, orjson.dumps({"error": {"code": code, "message": message}}), extra

    async def _routed(self, scope: Scope, path: list[str], receive: Receive) -> tuple[int, bytes, bytes]:
        method, name = scope["method"], path[1]
        if name == "act" and len(path) <= 3:
            _check_method(method, "POST")
            self._check_token(scope)
            asked = await self._asked(scope, receive)
            return 200, _JSON, await self._act(asked, path[2] if len(path) == 3 else None)
        if name == "sessions":
            self._check_token(scope)
            return await self._sessions(scope, method, path[2:], receive)
        if name == "policies" and len(path) <= 3:
            return await self._policies(scope, method, path[2:], receive)
        if len(path) == 2:
            answer = _PLACES.get(name)
            if answer is not None:
                _check_method(method, "GET", "HEAD")
                return answer(self, scope)
        raise RefusedError(
            404, "unknown_path", f"There is nothing at {scope['path']!r:.200}. /openapi.json lists what there is."
        )

    def _check_token(self, scope: Scope, for_admin: bool = False) -> None:
        self.tokens.check(_header(scope, b"authorization"), for_admin)

    async def _asked(self, scope: Scope, receive: Receive, may_be_empty: bool = False) -> dict[str, Any]:
        """The body of a request, which has to be a JSON object."""
        body = await self._body(scope, receive, self.limits.body_bytes)
        if not body and may_be_empty:
            return {}
        kind = _header(scope, b"content-type") or b""
        if kind.partition(b";")[0].strip().lower() != _JSON:  # also: no foreign web page can ask without being asked
            raise RefusedError(415, "no_json", "Send JSON, with the header `Content-Type: application/json`.")
        try:
            asked = orjson.loads(body)
        except (orjson.JSONDecodeError, RecursionError) as error:
            raise RefusedError(400, "malformed_json", f"The body is no JSON: {error}.") from None
        if type(asked) is not dict:
            raise RefusedError(400, "malformed_json", f"The body is a JSON {type(asked).__name__}, expected an object.")
        return asked

    async def _body(self, scope: Scope, receive: Receive, most: int) -> bytes:
        announced = _header(scope, b"content-length")
        if announced is not None and int(announced) > most:
            raise _too_large(most)
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _GoneError
        body: bytes = message.get("body", b"")
        if message.get("more_body"):
            parts, size = [body], len(body)
            while message.get("more_body"):
                if size > most:
                    raise _too_large(most)
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _GoneError
                parts.append(message.get("body", b""))
                size += len(parts[-1])
            body = b"".join(parts)
        if len(body) > most:
            raise _too_large(most)
        return body

    # -- deciding -----------------------------------------------------------------------------------------------------

    async def _act(self, asked: dict[str, Any], step_key: str | None) -> bytes:
        self._check_room()
        _check_names(asked, _ACT)
        options = _options(asked, step_key)
        name = _optional(asked, "policy", str, "a text")
        seed = _optional(asked, "seed", int, "a whole number")
        if "observation" in asked:
            begins = _optional(asked, "episode_start", bool, "true or false")
            carried = Carried(_optional(asked, "state", dict, "an object"), bool(begins))
            policy = self.policies.chosen(name, carried.bundle)
            return as_json(await self.policies.decide(policy, asked["observation"], options, seed, carried))
        observations = asked.get("observations")
        if type(observations) is not list or not 0 < len(observations) <= self.limits.n_observations:
            most = self.limits.n_observations
            raise _invalid(f"Send an `observation`, or `observations`: a list of 1 to {most} of them.")
        of_each = _carried(asked, len(observations))
        policy = self.policies.chosen(name, next((each.bundle for each in of_each if each.bundle), None))
        decisions = await self.policies.decide_many(policy, observations, options, seed, of_each)
        return as_json({"decisions": decisions, "policy": policy.name, "bundle": policy.bundle.sha256})

    def _check_room(self) -> None:
        if self.policies.n_waiting >= self.limits.n_waiting:
            raise RefusedError(503, "busy", f"{self.policies.n_waiting} decisions wait already. Ask again in a second.")

    async def _sessions(
        self, scope: Scope, method: str, path: Sequence[str], receive: Receive
    ) -> tuple[int, bytes, bytes]:
        if not path:
            _check_method(method, "POST")
            asked = await self._asked(scope, receive, may_be_empty=True)
            _check_names(asked, frozenset(("seed", "policy")))
            name = _optional(asked, "policy", str, "a text")
            session = self.policies.begin_session(name, _optional(asked, "seed", int, "a whole number"))
            return 201, _JSON, as_json(session.described())
        session = self.policies.session(path[0])
        if len(path) == 1:
            _check_method(method, "DELETE")
            self.policies.end_session(session)
            return 200, _JSON, as_json({"ended": session.id})
        _check_method(method, "POST")
        if path[1] == "reset" and len(path) == 2:
            asked = await self._asked(scope, receive, may_be_empty=True)
            _check_names(asked, frozenset(("seed",)))
            await session.settled()
            session.reset(checked_seed(_optional(asked, "seed", int, "a whole number")))
            return 200, _JSON, as_json(session.described())
        if path[1] == "act" and len(path) <= 3:
            asked = await self._asked(scope, receive)
            return 200, _JSON, await self._act_in(session, asked, path[2] if len(path) == 3 else None)
        raise RefusedError(404, "unknown_path", "A session has /act, /act/{step_key} and /reset.")

    async def _act_in(self, session: ServedSession, asked: dict[str, Any], step_key: str | None) -> bytes:
        self._check_room()
        _check_names(asked, _ACT_IN_SESSION)
        if "observation" not in asked:
            raise _invalid("`observation` is missing.")
        options = _options(asked, step_key)
        step = _optional(asked, "step", int, "a whole number")
        return as_json(await self.policies.decide_in(session, asked["observation"], options, step))

    # -- administration -----------------------------------------------------------------------------------------------

    async def _policies(
        self, scope: Scope, method: str, path: Sequence[str], receive: Receive
    ) -> tuple[int, bytes, bytes]:
        if method in {"GET", "HEAD"}:
            self._check_token(scope)
            if not path:
                return 200, _JSON, as_json({"policies": [each.described() for each in self.policies]})
            return 200, _JSON, as_json(self.policies.named(path[0]).described())
        if not path:
            raise RefusedError(405, "wrong_method", "GET /policies lists them; PUT /policies/{name} changes one.")
        _check_method(method, "PUT", "PATCH", "DELETE")
        self._check_token(scope, for_admin=True)
        name = path[0]
        asked_for = parse_qs(scope["query_string"].decode("latin-1"))
        if method == "PUT":
            content = await self._body(scope, receive, self.limits.bundle_bytes)
            ends = asked_for.get("end_sessions", ["false"])[-1] == "true"
            policy = await self.policies.put(name, content, ends_sessions=ends)
        elif method == "PATCH":
            asked = await self._asked(scope, receive)
            _check_names(asked, frozenset(("weight", "shadow")))
            policy = self.policies.change(
                name,
                _optional(asked, "weight", (int, float), "a number"),
                _optional(asked, "shadow", bool, "true or false"),
            )
        else:
            policy = self.policies.remove(name)
        return 200, _JSON, as_json(policy.described())

    # -- for people and machines that watch ---------------------------------------------------------------------------

    def _page(self, scope: Scope) -> tuple[int, bytes, bytes]:
        return 200, _HTML, _page()[0]

    def _health(self, scope: Scope) -> tuple[int, bytes, bytes]:
        return 200, _JSON, b'{"status":"alive"}'

    def _ready(self, scope: Scope) -> tuple[int, bytes, bytes]:
        return (200, _JSON, b'{"status":"ready"}') if self.is_ready else (503, _JSON, b'{"status":"not ready"}')

    def _open_api(self, scope: Scope) -> tuple[int, bytes, bytes]:
        self._check_token(scope)
        return 200, _JSON, as_json(open_api([each.described() for each in self.policies]))

    def _metrics(self, scope: Scope) -> tuple[int, bytes, bytes]:
        self._check_token(scope)
        exposition = Exposition()
        exposition.family(
            "maze_requests_total",
            "counter",
            "Requests that were answered.",
            {
                (("path", f"/{place}"), ("status", str(status))): count
                for (place, status), count in self._counts.requests.items()
            },
        )
        exposition.histograms("maze_request_seconds", "Time to an answer.", {(): self._counts.seconds})
        exposition.family("maze_requests_running", "gauge", "Requests without an answer.", {(): len(self._running)})
        self.policies.expose(exposition)
        return 200, _TEXT, exposition.text().encode()


_ROOMS = frozenset(("act", "sessions", "policies"))
_PLACES: Mapping[str, Callable[[Application, Scope], tuple[int, bytes, bytes]]] = {
    "": Application._page,
    "health": Application._health,
    "ready": Application._ready,
    "metrics": Application._metrics,
    "openapi.json": Application._open_api,
}


class _GoneError(Exception):
    """Whoever asked has hung up before the question was complete."""


def _header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            found: bytes = value
            return found
    return None


def _check_method(method: str, *allowed: str) -> None:
    if method not in allowed:
        raise RefusedError(405, "wrong_method", f"{method} is not possible here; {' or '.join(allowed)} is.")


def _check_names(asked: Mapping[str, Any], known: frozenset[str]) -> None:
    if not asked.keys() <= known:
        unknown = sorted(asked.keys() - known)[0]
        raise _invalid(f"`{unknown:.100}` is unknown.{did_you_mean(unknown, known)} Known: {', '.join(sorted(known))}.")


def _optional(asked: Mapping[str, Any], name: str, kind: type | tuple[type, ...], meaning: str) -> Any:
    value = asked.get(name)
    if value is None or (isinstance(value, kind) and (type(value) is not bool or kind is bool)):
        return value
    raise _invalid(f"`{name}` must be {meaning}, got {value!r:.100}.")


def _options(asked: Mapping[str, Any], step_key: str | None) -> Options:
    agent_id = _optional(asked, "agent_id", int, "a whole number")
    deterministic = _optional(asked, "deterministic", bool, "true or false")
    ranked = _optional(asked, "ranked", int, "a whole number")
    if ranked is not None and not 0 <= ranked <= _MOST_RANKED:
        raise _invalid(f"`ranked` must lie between 0 and {_MOST_RANKED}, got {ranked}.")
    return Options(step_key, agent_id or 0, deterministic is not False, ranked or 0)


def _carried(asked: Mapping[str, Any], n_rows: int) -> list[Carried]:
    """What a request brings along for each of several observations."""
    states, starts = asked.get("states"), asked.get("episode_starts")
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
def _page() -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """The page and its headers, by which a browser runs and loads nothing but what is in it."""
    page = (resources.files("maze.serve") / "page.html").read_bytes()

    def hash_of(tag: bytes) -> str:
        content = page.split(b"<%s>" % tag)[1].split(b"</%s>" % tag)[0]
        return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"

    policy = (
        f"default-src 'none'; script-src {hash_of(b'script')}; style-src {hash_of(b'style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    others = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))
    return page, [(b"content-security-policy", policy.encode()), *others]
