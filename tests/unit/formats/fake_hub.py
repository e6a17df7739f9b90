"""A hub on loopback: the few routes that huggingface_hub asks when it downloads a model."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class FakeHub:
    """Serves ``repositories``: id -> {file name: bytes}. One commit each."""

    def __init__(self, repositories):
        self.repositories = repositories
        self.gated = set()
        self.cut_after = {}  # file name -> bytes of the next answer after which the line is cut
        self.requests = []  # (method, path, Range header)
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def close(self):
        self._server.shutdown()
        self._thread.join(timeout=10)
        self._server.server_close()
        assert not self._thread.is_alive()

    def sha(self, repository):
        return hashlib.sha1(repository.encode()).hexdigest()

    def ranges(self, name):
        return [
            content_range
            for method, path, content_range in self.requests
            if method == "GET" and path.endswith("/" + name)
        ]

    def answer(self, handler):
        path = urlsplit(handler.path).path
        self.requests.append((handler.command, path, handler.headers.get("Range")))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path):
            repository, kind, revision = match.groups()
            self._describe(handler, repository, kind, revision)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._send_file(handler, *match.groups())
        else:
            self._refuse(handler, 404, "EntryNotFound")

    def _refuse(self, handler, status, code):
        handler.send_response(status)
        handler.send_header("X-Error-Code", code)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    def _known(self, handler, repository, revision):
        if repository in self.gated:
            self._refuse(handler, 403, "GatedRepo")
        elif repository not in self.repositories:
            self._refuse(handler, 404, "RepoNotFound")
        elif revision not in ("main", "v1", self.sha(repository)):
            self._refuse(handler, 404, "RevisionNotFound")
        else:
            return True
        return False

    def _describe(self, handler, repository, kind, revision):
        if not self._known(handler, repository, revision):
            return
        files = self.repositories[repository]
        if kind == "tree":
            answer = [
                {"type": "file", "path": name, "size": len(content), **_identity(content, "oid")}
                for name, content in files.items()
            ]
        else:
            answer = {
                "id": repository,
                "sha": self.sha(repository),
                "siblings": [
                    {"rfilename": name, "size": len(content), **_identity(content, "blobId")}
                    for name, content in files.items()
                ],
            }
        body = json.dumps(answer).encode()
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def _send_file(self, handler, repository, revision, name):
        if not self._known(handler, repository, revision):
            return
        content = self.repositories[repository].get(name)
        if content is None:
            self._refuse(handler, 404, "EntryNotFound")
            return
        start = 0
        if match := re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range") or ""):
            start = int(match[1])
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        handler.send_header("X-Repo-Commit", self.sha(repository))
        handler.send_header("ETag", f'"{_etag(content)}"')
        handler.send_header("Content-Length", str(len(content) - start))
        handler.end_headers()
        if handler.command == "HEAD":
            return
        cut = self.cut_after.pop(name, None)
        handler.wfile.write(content[start : None if cut is None else start + cut])
        if cut is not None:
            handler.close_connection = True


def _is_large(content):
    return len(content) > 1000


def _etag(content):
    if _is_large(content):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _identity(content, blob_key):
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if not _is_large(content):
        return {blob_key: oid}
    sha256 = hashlib.sha256(content).hexdigest()
    lfs = {"sha256": sha256, "oid": sha256, "size": len(content), "pointerSize": 134}
    return {blob_key: oid, "lfs": lfs}
