"""A small HTTP server for tests: files with Range and with faults, and the hub's addresses.

python hub_server.py FOLDER     serves FOLDER/[datasets/]org/name/... as a hub; prints its port
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Files(BaseHTTPRequestHandler):
    """Serves `server.data`; `server.faults` says how the next answers go wrong."""

    server: Any

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        data, range_header = self.server.data, self.headers.get("Range")
        self.server.ranges.append(range_header)
        fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault == "busy":
            self.send_error(503)
            return
        if fault == "gone":
            self.send_error(404)
            return
        start = 0
        if range_header and fault != "no range":
            start = int(re.fullmatch(r"bytes=(\d+)-", range_header)[1])  # type: ignore[index]
            if start >= len(data):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        body = data[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault == "cut":
            body = body[: len(body) // 2]
        elif fault == "wrong":
            body = bytes(len(body))
        elif fault == "slow":
            threading.Event().wait(1.0)
        self.wfile.write(body)
        self.close_connection = True


@contextmanager
def serving(data: bytes, *faults: str) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Files)
    server.data, server.faults, server.ranges = data, list(faults), []
    server.url = f"http://127.0.0.1:{server.server_port}/file.whl"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Hub(BaseHTTPRequestHandler):
    """The addresses that huggingface_hub asks for, over a folder of repositories."""

    root: Path

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        with (self.root / "asked.log").open("a") as log:
            log.write(f"{self.command} {self.path} {self.headers.get('Authorization')}\n")
        path = self.path.partition("?")[0]
        path = path.replace("/api/models/", "/api/")  # data sets lie in a folder of their own
        api = re.fullmatch(
            r"/api/((?:datasets/)?[^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?(?:/.*)?", path
        )
        file = re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if not api and not file:
            return self.say(404, {"error": "no such page"})
        match = api or file
        assert match
        repo = match[1]
        commit = hashlib.sha1(repo.encode()).hexdigest()
        revision = match[3] if api else match[2]
        if repo == "org/gated":
            return self.say(403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        if repo == "org/ill":
            return self.say(500, {"error": "ill"})
        if not (self.root / repo).is_dir():
            return self.say(
                404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
            )
        if revision not in (None, "main", commit):
            return self.say(404, {"error": "no"}, {"X-Error-Code": "RevisionNotFound"})
        folder = self.root / repo
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if api and api[2] == "tree":
            tree = [{"type": "file", "path": path.relative_to(folder).as_posix(),
                     "size": path.stat().st_size, "oid": etag(path)} for path in files]  # fmt: skip
            return self.say(200, tree)
        if api:
            names = [{"rfilename": path.relative_to(folder).as_posix(), "size": path.stat().st_size}
                     for path in files]  # fmt: skip
            return self.say(200, {"id": repo, "sha": commit, "siblings": names, "private": False})
        target = folder / match[3]
        if not target.is_file():
            return self.say(404, {"error": "no"}, {"X-Error-Code": "EntryNotFound"})
        self.send_response(200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{etag(target)}"')
        self.send_header("Content-Length", str(target.stat().st_size))
        self.end_headers()
        if body:
            self.wfile.write(target.read_bytes())

    def say(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def etag(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def hub_process(root: Path) -> Iterator[str]:
    """Serve a folder as a hub in a separate process; yields its URL."""
    server = subprocess.Popen(
        [sys.executable, __file__, str(root)], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout
    try:
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    Hub.root = Path(sys.argv[1])
    hub = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    print(hub.server_port, flush=True)
    hub.serve_forever()
