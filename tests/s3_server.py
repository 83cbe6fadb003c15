"""A small S3 server for tests, of the standard library: what `pyarrow.fs.S3FileSystem` asks for, and faults.

Buckets and objects are in memory, requests are not authenticated. It answers PUT, GET (with ranges), HEAD, DELETE and
copies of objects, ListObjectsV2 (in pages), deletion of several objects, multipart uploads, and bodies in
`aws-chunked` encoding. As with S3, an object is there when all of its bytes are, or not at all.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape


@dataclass
class StoredObject:
    """The content of an object, and when it was written."""

    content: bytes
    written: float = field(default_factory=time.time)

    @property
    def etag(self) -> str:
        """What S3 calls the checksum."""
        return f'"{hashlib.md5(self.content, usedforsecurity=False).hexdigest()}"'


class Answer(NamedTuple):
    """What a request is answered with."""

    status: int
    content: bytes = b""
    headers: Sequence[tuple[str, str]] = ()


class RefusedError(Exception):
    """A request is answered with an error.

    :param status: HTTP status.
    :param code: S3's name of the error.
    """

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class S3Server(ThreadingHTTPServer):
    """The server; as a context, it runs in a thread of its own.

    :param page: Number of keys that a listing holds at most.
    """

    daemon_threads = True

    def __init__(self, page: int = 1000) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.page = page
        self.buckets: dict[str, dict[str, StoredObject]] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        """Parts of multipart uploads that are not complete."""
        self.lock = threading.RLock()
        self.numbers = itertools.count(1)
        self.is_refused: Callable[[str, str, str], bool] = lambda method, bucket, key: False
        """Whether a request is answered with 403."""
        self.is_cut: Callable[[str, str, str], bool] = lambda method, bucket, key: False
        """Whether the connection is lost after half of what a request sends."""
        self.n_cut = 0
        """How often that has happened."""

    @property
    def options(self) -> str:
        """What a URL says after its `?` to be served here."""
        return f"region=us-east-1&scheme=http&endpoint_override=127.0.0.1:{self.server_port}"

    def __enter__(self) -> S3Server:
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that leave are not news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # answers are short
    server: S3Server

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged: it would be in the log of the run that is tested."""

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        self.bucket, _, self.key = unquote(parts.path).lstrip("/").partition("/")
        self.query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        body = self._body()
        if body is None:
            return
        try:
            if self.server.is_refused(self.command, self.bucket, self.key):
                raise RefusedError(403, "AccessDenied")
            with self.server.lock:
                answer = self._of_object(body) if self.key else self._of_bucket(body)
        except RefusedError as refused:
            text = f"<Error><Code>{refused.code}</Code><Message>{refused.code}</Message></Error>".encode()
            answer = Answer(refused.status, text)
        self._send(answer)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer  # noqa: N815

    def _body(self) -> bytes | None:
        """What the request sends; `None`: the connection is lost before all of it is there."""
        n_bytes = int(self.headers.get("Content-Length") or 0)
        if self.command in ("PUT", "POST") and self.server.is_cut(self.command, self.bucket, self.key):
            self.rfile.read(n_bytes // 2)
            self.server.n_cut += 1
            self.close_connection = True
            self.connection.close()
            return None
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            content = _unchunked(self.rfile.readline, self.rfile.read)
        else:
            content = self.rfile.read(n_bytes)
            if len(content) < n_bytes:
                self.close_connection = True
                return None
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            lines = _Lines(content)
            content = _unchunked(lines.readline, lines.read)
        return content

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.content)

    # -- buckets ------------------------------------------------------------------------------------

    def _of_bucket(self, body: bytes) -> Answer:
        if not self.bucket:
            names = "".join(f"<Bucket><Name>{escape(name)}</Name></Bucket>" for name in self.server.buckets)
            return Answer(200, f"<ListAllMyBucketsResult><Buckets>{names}</Buckets></ListAllMyBucketsResult>".encode())
        if self.command == "PUT":
            self.server.buckets.setdefault(self.bucket, {})
            return Answer(200)
        objects = self._objects()
        if self.command == "HEAD":
            return Answer(200)
        if self.command == "POST" and "delete" in self.query:
            for element in ElementTree.fromstring(body).iter():
                if element.tag.endswith("Key"):
                    objects.pop(element.text or "", None)
            return Answer(200, b"<DeleteResult></DeleteResult>")
        if self.command == "GET":
            return Answer(200, self._listing(objects))
        raise RefusedError(405, "MethodNotAllowed")

    def _objects(self) -> dict[str, StoredObject]:
        if self.bucket not in self.server.buckets:
            raise RefusedError(404, "NoSuchBucket")
        return self.server.buckets[self.bucket]

    def _listing(self, objects: dict[str, StoredObject]) -> bytes:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        after = self.query.get("continuation-token", "") or self.query.get("start-after", "")
        size = min(int(self.query.get("max-keys") or self.server.page), self.server.page)
        shown: dict[str, StoredObject | None] = {}  # `None`: what several keys begin with
        for key in sorted(key for key in objects if key.startswith(prefix)):
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            name = prefix + head + delimiter if found else key
            if name > after and (not after.endswith(delimiter or "\0") or not name.startswith(after)):
                shown.setdefault(name, None if found else objects[key])
        page = list(shown.items())[:size]
        rows = [
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            if stored is None
            else f"<Contents><Key>{escape(name)}</Key><LastModified>{_iso(stored.written)}</LastModified><ETag>"
            f"{escape(stored.etag)}</ETag><Size>{len(stored.content)}</Size></Contents>"
            for name, stored in page
        ]
        if is_cut := len(shown) > size:
            rows.append(f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>")
        rows.append(f"<IsTruncated>{str(is_cut).lower()}</IsTruncated><KeyCount>{len(page)}</KeyCount>")
        return f"<ListBucketResult><Name>{escape(self.bucket)}</Name>{''.join(rows)}</ListBucketResult>".encode()

    # -- objects ------------------------------------------------------------------------------------

    def _of_object(self, body: bytes) -> Answer:
        objects, upload = self._objects(), self.query.get("uploadId")
        if upload is not None:
            return self._of_upload(objects, upload, body)
        if self.command == "POST" and "uploads" in self.query:
            name = f"upload-{next(self.server.numbers)}"
            self.server.uploads[name] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
            return Answer(200, text.encode())
        if self.command == "PUT":
            source = self.headers.get("x-amz-copy-source")
            if source is not None:
                bucket, _, key = unquote(source).lstrip("/").partition("/")
                body = self.server.buckets[bucket][key].content
            objects[self.key] = StoredObject(body)
            etag = escape(objects[self.key].etag)
            text = f"<CopyObjectResult><ETag>{etag}</ETag></CopyObjectResult>" if source else ""
            return Answer(200, text.encode(), (("ETag", objects[self.key].etag),))
        if self.command == "DELETE":
            objects.pop(self.key, None)
            return Answer(204)
        if self.key not in objects:
            raise RefusedError(404, "NoSuchKey")
        return self._content(objects[self.key])

    def _content(self, stored: StoredObject) -> Answer:
        about = [
            ("ETag", stored.etag),
            ("Last-Modified", formatdate(stored.written, usegmt=True)),
            ("Accept-Ranges", "bytes"),
            ("Content-Type", "application/octet-stream"),
        ]
        content, status = stored.content, 200
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), int(wanted[2] or len(content) - 1)
            if first >= len(content):
                raise RefusedError(416, "InvalidRange")
            about.append(("Content-Range", f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"))
            content, status = content[first : last + 1], 206
        return Answer(status, content, about)

    def _of_upload(self, objects: dict[str, StoredObject], upload: str, body: bytes) -> Answer:
        if upload not in self.server.uploads:
            raise RefusedError(404, "NoSuchUpload")
        parts = self.server.uploads[upload]
        if self.command == "PUT":
            parts[int(self.query["partNumber"])] = body
            return Answer(200, b"", (("ETag", StoredObject(body).etag),))
        del self.server.uploads[upload]
        if self.command == "DELETE":
            return Answer(204)
        named = [int(e.text or 0) for e in ElementTree.fromstring(body).iter() if e.tag.endswith("PartNumber")]
        if not set(named) <= set(parts):
            raise RefusedError(400, "InvalidPart")
        objects[self.key] = StoredObject(b"".join(parts[number] for number in named))
        etag = escape(objects[self.key].etag)
        text = f"<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>"
        return Answer(200, text.encode())


class _Lines:
    """Reads bytes as a file."""

    def __init__(self, content: bytes) -> None:
        self._content, self._place = content, 0

    def readline(self) -> bytes:
        """The next line."""
        end = self._content.find(b"\n", self._place) + 1
        return self.read((end or len(self._content)) - self._place)

    def read(self, n_bytes: int) -> bytes:
        """The next bytes."""
        self._place += n_bytes
        return self._content[self._place - n_bytes : self._place]


def _unchunked(readline: Callable[[], bytes], read: Callable[[int], bytes]) -> bytes:
    """The body that comes in chunks, each after its size; what follows the last one are checksums."""
    chunks = []
    while n_bytes := int(readline().split(b";")[0].strip() or b"0", 16):
        chunks.append(read(n_bytes))
        readline()
    while readline().strip():
        pass
    return b"".join(chunks)


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"
