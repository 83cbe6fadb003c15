"""`maze-serve`: serves policy bundles over HTTP by uvicorn, with limits on connections, or replays a decision log."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import pkgutil
import platform
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from maze.core.annotations import override
from maze.core.errors import ConfigError, ConfigImportError, MazeError
from maze.serve.app import Application, Limits, Tokens
from maze.serve.bundle import PolicyBundle, bundle_path
from maze.serve.bundle_file import sha256
from maze.serve.decision_log import DecisionLog, replay
from maze.serve.drift import DriftLimits
from maze.serve.pipeline import Actor, Provided
from maze.serve.policies import Policies
from maze.serve.served import Fallback, Settings

_LOGGER = logging.getLogger(__name__)
_TOKEN, _ADMIN_TOKEN = "MAZE_SERVE_TOKEN", "MAZE_SERVE_ADMIN_TOKEN"
_MEBIBYTE = 1 << 20
_POSITIVE = ("max_body", "max_bundle", "max_sessions", "session_seconds", "time_limit", "max_batch", "log_files",
             "log_file_size")  # fmt: skip
_SETTINGS = ("max_batch", "batch_delay", "max_sessions", "session_seconds", "on_drift", "explore")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    :param arguments: Arguments of the command line; by default those of this process.
    :return: Exit status: 0; 1 for an error, or a difference in a replay.
    """
    options = _parser().parse_intermixed_args(arguments)
    try:
        sources = _sources(options.bundles)
        provided = {name: _imported(path) for name, path in map(_assignment, options.provide)}
        if options.replay is not None:
            return _replay(Path(options.replay), sources, provided)
        return _serve(options, sources, provided)
    except MazeError as error:
        print(f"maze-serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="maze-serve", description="Serves decisions of trained policies.", allow_abbrev=False
    )
    add = parser.add_argument
    add("bundles", nargs="+", metavar="[name=]policy.maze", help="bundles (`maze-run --export`), or shelf:<name>")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000, help="0: any free port, which is logged")
    several = partial(parser.add_argument_group("several policies").add_argument, action="append", default=[])
    share = "share of the requests that name no policy; by default the first policy has all"
    several("--weight", metavar="NAME=SHARE", help=share)
    shadow = "decides along with the others; its decisions are compared and logged only"
    several("--shadow", metavar="NAME", help=shadow)
    several("--provide", metavar="NAME=MODULE:FUNCTION", help="code that a bundle needs")
    add = parser.add_argument_group("access", f"tokens: {_TOKEN} and {_ADMIN_TOKEN}, or files, one a line").add_argument
    add("--token-file", type=Path)
    add("--admin-token-file", type=Path)
    add("--open", action="store_true", help="serve other machines without tokens")
    add = parser.add_argument_group("limits").add_argument
    add("--max-body", type=float, default=1.0, metavar="MIB")
    add("--max-bundle", type=float, default=512.0, metavar="MIB", help="size of an uploaded bundle")
    add("--max-sessions", type=int, default=Settings.max_sessions)
    expiry, limit = "time to expiry of an unused session", "of a request, and of its head"
    add("--session-seconds", type=float, default=Settings.session_seconds, help=expiry)
    add("--time-limit", type=float, default=Limits.seconds, metavar="SECONDS", help=limit)
    add("--max-batch", type=int, default=Settings.max_batch)
    add("--batch-delay", type=float, default=Settings.batch_delay, metavar="SECONDS")
    drain = "time to continue after SIGTERM, while /ready answers 503"
    add("--drain", type=float, default=0.0, metavar="SECONDS", help=drain)
    add = parser.add_argument_group("drift").add_argument
    choices = ("warn", "refuse", "fallback")
    add("--on-drift", choices=choices, default="warn", help="reaction to observations outside the training's range")
    add("--fallback", metavar="MODULE:NAME", help="a policy class, or a function of observation and actor")
    add("--drift-psi", type=float, default=DriftLimits.psi)
    add("--drift-out-of-range", type=float, default=DriftLimits.out_of_range)
    add("--drift-window", type=int, default=DriftLimits.window)
    add = parser.add_argument_group("decision log").add_argument
    add("--decision-log", metavar="DIRECTORY")
    add("--log-file-size", type=float, default=64.0, metavar="MIB")
    add("--log-files", type=int, default=16, help="maximum number; the oldest are deleted")
    add("--explore", type=float, default=0.0, metavar="SHARE", help="share of actions drawn from all allowed ones")
    add("--replay", metavar="LOG", help="repeat the decisions of a log and compare, without serving")
    return parser


# -- from the command line to objects ---------------------------------------------------------------------------------


def _assignment(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not (name and separator and value):
        raise ConfigError(f"{text!r} is not of the form NAME=VALUE.")
    return name, value


def _sources(bundles: Sequence[str]) -> dict[str, Path]:
    """Return files by policy names."""
    sources: dict[str, Path] = {}
    for text in bundles:
        path = bundle_path(text)
        name = path.stem
        if "=" in text and not path.exists():
            name, value = _assignment(text)
            path = bundle_path(value)
        if name in sources:
            raise ConfigError(f"Two policies have the name {name!r}: {sources[name]} and {path}. Write name={path}.")
        sources[name] = path
    return sources


def _imported(path: str) -> Any:
    """Import an object that the command line names."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # as with `python -m`
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigImportError(f"{path!r} cannot be imported ({error}). Expected MODULE:NAME.") from error


def fallback_of(path: str) -> Fallback:
    """Import a heuristic that decides in place of the policy.

    :param path: A function of an observation's entries and the actor, or a :class:`~maze.core.agent.policy.Policy` that
        needs neither arguments nor the environment nor its state.
    :raises ConfigError: It cannot be used.
    """
    found = _imported(path)
    if not isinstance(found, type):
        if not callable(found):
            raise ConfigError(f"--fallback {path}: expected a function or a policy class, found {found!r:.100}.")
        return found  # type: ignore[no-any-return]
    from maze.core.env.structured_env import ActorID

    policy: Any = found()
    if not hasattr(policy, "compute_action") or policy.needs_state() or policy.needs_env():
        raise ConfigError(f"--fallback {path}: only policies that need nothing but the observation can be used.")

    def decide(observation: Mapping[str, Any], actor: Actor) -> Any:
        return policy.compute_action(
            dict(observation), maze_state=None, env=None, actor_id=ActorID(*actor), deterministic=True
        )

    return decide


def _tokens(options: argparse.Namespace) -> Tokens:
    acting = _tokens_from(options.token_file, _TOKEN)
    admin = _tokens_from(options.admin_token_file, _ADMIN_TOKEN)
    if not acting and not options.open and options.host not in ("localhost", "127.0.0.1", "::1"):
        raise ConfigError(f"{options.host} is open to all clients. Set {_TOKEN} or --token-file, or pass --open.")
    return Tokens(acting, admin)


def _tokens_from(path: Path | None, variable: str) -> list[str]:
    if path is None and variable not in os.environ:
        return []
    try:
        tokens = (os.environ[variable] if path is None else path.read_text(encoding="utf-8")).split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The tokens in {path} cannot be read: {error}.") from error
    if not tokens:
        raise ConfigError(f"{path or variable} holds no token.")
    return tokens


def _settings(options: argparse.Namespace, provided: Provided) -> Settings:
    if (options.on_drift == "fallback") != (options.fallback is not None):
        raise ConfigError("--on-drift fallback and --fallback MODULE:NAME belong together.")
    for name in _POSITIVE:
        if not getattr(options, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, found {getattr(options, name)}.")
    for name, most in (("explore", 1), ("port", 65535)):
        if not 0 <= getattr(options, name) <= most:
            raise ConfigError(f"--{name} must lie in [0, {most}], found {getattr(options, name)}.")
    window = options.drift_window
    at_least = min(window, DriftLimits.at_least)
    return Settings(
        drift=DriftLimits(options.drift_psi, options.drift_out_of_range, window=window, at_least=at_least),
        fallback=None if options.fallback is None else fallback_of(options.fallback),
        provided=provided,
        **{name: getattr(options, name) for name in _SETTINGS},
    )


def _application(options: argparse.Namespace, sources: Mapping[str, Path], provided: Provided) -> Application:
    settings, tokens = _settings(options, provided), _tokens(options)
    try:
        weights = {name: float(share) for name, share in map(_assignment, options.weight)}
    except ValueError as error:
        raise ConfigError(f"--weight NAME=SHARE: expected a number as share ({error}).") from error
    for name in (*weights, *options.shadow):
        if name not in sources:
            raise ConfigError(f"There is no policy {name!r}; there are {list(sources)}.")
    bundles = {name: PolicyBundle.load(path) for name, path in sources.items()}
    log = None
    if options.decision_log is not None:
        size = int(options.log_file_size * _MEBIBYTE)
        import onnxruntime

        versions = {  # the bits of a result may depend on them
            "python": platform.python_version(),
            "numpy": np.__version__,
            "onnxruntime": onnxruntime.__version__,
            "machine": platform.machine(),
        }
        log = DecisionLog(options.decision_log, versions, size, options.log_files)
    policies = Policies(settings, log)
    if not weights:
        weights = dict.fromkeys([name for name in bundles if name not in options.shadow][:1], 1.0)
    for name, bundle in bundles.items():
        policies.add(name, bundle, is_shadow=name in options.shadow)
        policies.change(name, weights.get(name, 0.0), None)
    limits = Limits(int(options.max_body * _MEBIBYTE), int(options.max_bundle * _MEBIBYTE), options.time_limit)
    return Application(policies, limits, tokens)


# -- running ----------------------------------------------------------------------------------------------------------


def _replay(path: Path, sources: Mapping[str, Path], provided: Provided) -> int:
    result = replay(path, [PolicyBundle.load(source) for source in sources.values()], provided)
    print(result.summary())
    if not result.n_decisions:
        print("maze-serve: the log holds no decision of these bundles.", file=sys.stderr)
    return 0 if result.n_decisions and not result.n_different else 1


def _serve(options: argparse.Namespace, sources: Mapping[str, Path], provided: Provided) -> int:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    application = _application(options, sources, provided)
    config = server_config(application, options.host, options.port)
    gc.collect()
    gc.freeze()  # collections of the long-lived objects would delay requests by milliseconds
    Server(config, application, options.drain, partial(_reload, application, options, sources)).run()
    return 0


async def _reload(application: Application, options: argparse.Namespace, sources: Mapping[str, Path]) -> None:
    """Reload bundles and tokens that have changed; those that cannot be read stay as they were."""
    for name, path in sources.items():
        try:
            content = await asyncio.get_running_loop().run_in_executor(None, path.read_bytes)
            if sha256(content) != application.policies.named(name).bundle.sha256:
                await application.policies.put(name, content, path=path)
        except (MazeError, OSError) as error:  # noqa: PERF203
            _LOGGER.error("%s was not reloaded, policy %s stays as it was: %s", path, name, error)
    try:
        application.tokens = _tokens(options)
    except MazeError as error:
        _LOGGER.error("The tokens were not reloaded: %s", error)


class _JsonLines(logging.Formatter):
    """Format a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = "".join(traceback.format_exception(record.exc_info[1]))
        return json.dumps(line)


# -- uvicorn with limits on connections, and signals of an operator ----------------------------------------------------


LARGEST_HEAD = 64 << 10
"""Maximum bytes of a request line with its headers and trailers."""
MOST_AHEAD = 16
"""Maximum number of requests of a connection that are received before the first of them is answered."""
_SEND_BUFFER = 256 << 10  # bytes of responses that the system buffers for a connection
_CONNECTION = "maze.serve.connection"
_TOO_LARGE, _TOO_LATE = b"431 Request Header Fields Too Large", b"408 Request Timeout"


def server_config(application: Application, host: str = "127.0.0.1", port: int = 0) -> uvicorn.Config:
    """Configure uvicorn for an application.

    :param application: The application, with its limits.
    :param host: Address to listen on.
    :param port: The port; 0: any free port.
    """
    seconds = application.limits.seconds

    async def tracked(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await application(scope, receive, send)
        finally:
            if scope["type"] == "http":
                scope["state"][_CONNECTION].answered()

    return uvicorn.Config(
        tracked,
        host=host,
        port=port,
        loop="auto",  # uvloop, where there is one
        http=partial(GuardedProtocol, seconds=seconds),  # type: ignore[arg-type]  # a factory
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,  # longer than the 60 s after which proxies usually close a connection themselves
        timeout_graceful_shutdown=int(seconds) + 1,
    )


class GuardedProtocol(HttpToolsProtocol):
    """A connection with limits on heads, trailers, pipelined requests, and the time for sending and reading.

    uvicorn accepts heads and trailers of any size, any number of pipelined requests, and waits without limit for
    clients that neither send nor read. The application's limits hold between the head of a request and its response.
    The class uses the methods of :class:`asyncio.Protocol`, the callbacks of httptools, and the state of ASGI scopes.

    :param app_state: State of the application's scopes.
    :param seconds: Maximum time from the beginning of the connection, or the first byte after a response, to the end of
        a head; and from a response until the client has read it.
    """

    def __init__(self, *, app_state: dict[str, Any], seconds: float, **kwargs: Any) -> None:
        super().__init__(app_state={**app_state, _CONNECTION: self}, **kwargs)
        self._seconds = seconds
        self._channel: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._waits_since: float | None = None
        self._unread_since: float | None = None
        self._n_head_bytes = 0  # bytes of the request line, headers and trailers
        self._n_pending_bytes = 0  # bytes received since the parser has last completed a head or a part of a body
        self._n_requests = 0
        self._n_unanswered = 0
        self._is_in_body = False

    @override(HttpToolsProtocol)
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._channel = transport
        self._check()

    @override(HttpToolsProtocol)
    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    @override(HttpToolsProtocol)
    def data_received(self, data: bytes) -> None:
        self._n_pending_bytes += len(data)
        super().data_received(data)
        if self._n_pending_bytes > LARGEST_HEAD and not self._channel.is_closing():
            self._refuse(_TOO_LARGE)

    # -- callbacks of the parser; an exception ends parsing -----------------------------------------------------------

    @override(HttpToolsProtocol)
    def on_message_begin(self) -> None:
        if self._n_unanswered >= MOST_AHEAD:
            self._channel.close()
            raise _RefusedError
        self._n_head_bytes = 0
        super().on_message_begin()

    @override(HttpToolsProtocol)
    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    @override(HttpToolsProtocol)
    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if not self._is_in_body:  # trailers are not headers
            super().on_header(name, value)

    @override(HttpToolsProtocol)
    def on_headers_complete(self) -> None:
        self._n_pending_bytes, self._is_in_body = 0, True
        self._n_requests += 1
        self._n_unanswered += 1
        super().on_headers_complete()

    @override(HttpToolsProtocol)
    def on_body(self, body: bytes) -> None:
        self._n_pending_bytes = 0
        super().on_body(body)

    @override(HttpToolsProtocol)
    def on_message_complete(self) -> None:
        self._n_pending_bytes, self._is_in_body = 0, False
        super().on_message_complete()

    # -- limits -------------------------------------------------------------------------------------------------------

    def answered(self) -> None:
        """Count a response of the application."""
        self._n_unanswered -= 1

    def _count(self, n_bytes: int) -> None:
        self._n_head_bytes += n_bytes
        if self._n_head_bytes > LARGEST_HEAD:
            self._refuse(_TOO_LARGE)
            raise _RefusedError

    def _check(self) -> None:
        """Close the connection if its time limit is exceeded; otherwise check again soon."""
        loop = asyncio.get_running_loop()
        now, latest = loop.time(), loop.time() - self._seconds
        if not self._channel.get_write_buffer_size():
            self._unread_since = None
        elif self._unread_since is None:
            self._unread_since = now
        is_idle = self._n_requests and not self._n_pending_bytes and not self._is_in_body
        if is_idle or self._n_unanswered:
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = now
        if self._unread_since is not None and self._unread_since < latest:
            self._channel.abort()  # closing would wait until the response is read
        elif self._waits_since is not None and self._waits_since < latest and not self._channel.is_closing():
            if self._n_pending_bytes:
                self._refuse(_TOO_LATE)
            else:
                self._channel.close()
        self._timer = loop.call_later(self._seconds / 8, self._check)

    def _refuse(self, status: bytes) -> None:
        self._channel.write(b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)
        self._channel.close()


class _RefusedError(Exception):
    """The connection has been refused and closed."""


class Server(uvicorn.Server):
    """Log the address, reload bundles at SIGHUP, and drain at SIGTERM.

    :param config: See :func:`server_config`.
    :param application: The application.
    :param drain: Seconds to continue after SIGTERM, while `/ready` answers 503.
    :param reload: Awaited at SIGHUP.
    """

    def __init__(
        self, config: uvicorn.Config, application: Application, drain: float, reload: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(config)
        self._application, self._drain, self._reload = application, drain, reload
        self._reloads: list[asyncio.Future[None]] = []

    @override(uvicorn.Server)
    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            names = ", ".join(policy.name for policy in self._application.policies)
            _LOGGER.info("Serving %s on http://%s:%d", names, f"[{host}]" if ":" in host else host, port)
            if hasattr(signal, "SIGHUP"):
                loop = asyncio.get_running_loop()
                loop.add_signal_handler(
                    signal.SIGHUP, lambda: self._reloads.append(asyncio.ensure_future(self._reload()))
                )

    @override(uvicorn.Server)
    def handle_exit(self, sig: int, frame: Any) -> None:
        is_first = self._application.is_ready
        self._application.is_ready = False
        if sig != signal.SIGTERM:
            super().handle_exit(sig, frame)
        else:  # uvicorn would raise the signal again after its responses, so that the exit status were not 0
            loop = asyncio.get_event_loop()
            delay = self._drain if is_first else 0.0
            loop.call_soon_threadsafe(loop.call_later, delay, setattr, self, "should_exit", True)


if __name__ == "__main__":
    sys.exit(main())
