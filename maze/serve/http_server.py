"""uvicorn with limits on connections, and signals of an operator."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from maze.core.annotations import override
from maze.serve.app import Application

_LOGGER = logging.getLogger(__name__)

LARGEST_HEAD = 64 << 10
"""Maximum bytes of a request line with its headers and trailers."""
MOST_AHEAD = 16
"""Maximum number of requests of a connection that are received before the first of them is answered."""
_SEND_BUFFER = 256 << 10
"""Bytes of responses that the system buffers for a connection."""
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
        self._n_head_bytes = 0
        """Bytes of the request line, headers and trailers."""
        self._n_pending_bytes = 0
        """Bytes received since the parser has last completed a head or a part of a body."""
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
        if self._drain > 0 and is_first and sig == signal.SIGTERM:
            loop = asyncio.get_event_loop()
            loop.call_soon_threadsafe(loop.call_later, self._drain, super().handle_exit, sig, frame)
        else:
            super().handle_exit(sig, frame)
