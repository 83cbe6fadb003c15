"""Local server of a live page, which browsers reload when it changes."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from maze.report.page import CONTENT_POLICY, Page

_HOST = "127.0.0.1"


class PageServer(ThreadingHTTPServer):
    """Serve one page on this machine, built for each request.

    :param build: Builds the page.
    :param port: The port; 0: any free port.
    """

    daemon_threads = True

    def __init__(self, build: Callable[[], Page], port: int = 0) -> None:
        super().__init__((_HOST, port), _Handler)
        self._build = build
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """URL of the page."""
        return f"http://{_HOST}:{self.server_address[1]}/"

    def current(self) -> tuple[Page, str]:
        """Return the current page and its version."""
        with self._lock:
            page = self._build()
        # the version excludes the time of writing
        content = page.text().replace(page.note, "") if page.note else page.text()
        return page, hashlib.sha256(content.encode("utf-8", errors="replace")).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        if self.headers.get("Host", "").partition(":")[0] not in (_HOST, "localhost"):
            self.send_error(403)  # DNS rebinding
            return
        if self.path not in ("/", "/version"):
            self.send_error(404)
            return
        page, version = self.server.current()
        text = version if self.path == "/version" else page.text(version)
        content = text.encode("utf-8", errors="replace")
        self.send_response(200)
        kind = "text/plain" if self.path == "/version" else "text/html"
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", CONTENT_POLICY)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log no requests."""


def serve(build: Callable[[], Page]) -> None:
    """Serve a page until an interrupt.

    :param build: Builds the page.
    """
    with PageServer(build) as server:
        print(f"The report is at {server.address} (Ctrl-C ends it).", flush=True)
        server.serve_forever()
