"""uvicorn as `maze-serve` runs it: with a limit on slow heads of requests, and signals that an operator sends."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from maze.core.annotations import override
from maze.serve.app import Application

_LOGGER = logging.getLogger(__name__)

LARGEST_HEAD = 64 << 10
"""Bytes of a request line with its headers."""


def server_config(application: Application, host: str = "127.0.0.1", port: int = 0) -> uvicorn.Config:
    """How an application is served.

    :param application: The application, with its limits.
    :param host: Where to listen.
    :param port: The port; 0: any that is free.
    """
    seconds = application.limits.seconds
    return uvicorn.Config(
        application,
        host=host,
        port=port,
        loop="auto",  # uvloop, where there is one
        http=partial(LimitedHeadProtocol, head_seconds=seconds),  # type: ignore[arg-type]  # makes one
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,  # longer than the 60 s after which proxies usually close a connection themselves
        timeout_graceful_shutdown=int(seconds) + 1,
    )


class LimitedHeadProtocol(HttpToolsProtocol):
    """A connection that is closed when the head of a request does not come to its end.

    uvicorn itself waits for ever for a connection that sends nothing, or a byte now and then, and takes heads of any
    size. The application's own limits begin behind the head.

    :param head_seconds: From the beginning of the connection, or the first byte after an answer, to the end of a head.
    """

    def __init__(self, *args: Any, head_seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_seconds = head_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._n_head_bytes = 0
        self._is_in_body = False

    @override(HttpToolsProtocol)
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer = self.loop.call_later(self._head_seconds, self._on_time)

    @override(HttpToolsProtocol)
    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        super().connection_lost(exc)

    @override(HttpToolsProtocol)
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering() or self.transport.is_closing():
            return
        if self._timer is None:
            self._timer = self.loop.call_later(self._head_seconds, self._on_time)
        if not self._is_in_body:  # of a request that was answered before its body had come
            self._n_head_bytes += len(data)
            if self._n_head_bytes > LARGEST_HEAD:
                self._refuse(b"431 Request Header Fields Too Large")

    @override(HttpToolsProtocol)
    def on_headers_complete(self) -> None:
        self._end_timer()
        self._n_head_bytes, self._is_in_body = 0, True
        super().on_headers_complete()

    @override(HttpToolsProtocol)
    def on_message_complete(self) -> None:
        self._is_in_body = False
        super().on_message_complete()

    def _is_answering(self) -> bool:
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time(self) -> None:
        self._timer = None
        if self._is_answering() or self.transport.is_closing():
            return
        if self._n_head_bytes:
            self._refuse(b"408 Request Timeout")
        else:
            self.transport.close()

    def _refuse(self, status: bytes) -> None:
        self.transport.write(b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)
        self.transport.close()


class Server(uvicorn.Server):
    """Says where it is, reads bundles again at SIGHUP, and drains at SIGTERM.

    :param config: See :func:`server_config`.
    :param application: The application.
    :param drain: Seconds to go on after SIGTERM, while `/ready` says no.
    :param read_again: Awaited at SIGHUP.
    """

    def __init__(
        self, config: uvicorn.Config, application: Application, drain: float, read_again: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(config)
        self._application, self._drain, self._read_again = application, drain, read_again
        self._tasks: set[asyncio.Future[None]] = set()

    @override(uvicorn.Server)
    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            names = ", ".join(policy.name for policy in self._application.policies)
            _LOGGER.info("Serving %s on http://%s:%d", names, f"[{host}]" if ":" in host else host, port)
            if hasattr(signal, "SIGHUP"):
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_hangup)

    @override(uvicorn.Server)
    def handle_exit(self, sig: int, frame: Any) -> None:
        is_first = self._application.is_ready
        self._application.is_ready = False
        if self._drain > 0 and is_first and sig == signal.SIGTERM:
            loop = asyncio.get_event_loop()
            loop.call_soon_threadsafe(loop.call_later, self._drain, super().handle_exit, sig, frame)
        else:
            super().handle_exit(sig, frame)

    def _on_hangup(self) -> None:
        task = asyncio.ensure_future(self._read_again())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
