"""Clients of a server of text, in a process of their own: python bench/serving/load.py < job.json

The job, on stdin:
    {"port": 8000, "path": "/v1/completions", "max_tokens": 64, "seconds": 120, "patience": 600,
     "clients": [["body", "body"], ["body"]], "began": 1234.5}
`began`, if given, is the moment by the system's monotonic clock at which all begin, so that several
of these processes begin together. Each client sends its bodies one after the other, the next when
the one before has ended, all clients at once. After `seconds` no request is begun any more; after
`patience` those that still run have failed. The answer, on stdout:
    {"rows": [{"client": 0, "sent": 0.0, "times": [0.2, 0.3], "ended": 0.3, "tokens": 2,
               "counted": "usage", "finish": "length", "failure": ""}],
     "not_begun": 0, "cpu_s": 0.1}
Times are in seconds since the clients began; `times` are those of the events that brought text.

This shares its cores with the server: nothing but the standard library, one thread, callbacks
instead of streams, and JSON is only read where it says something that a search does not find.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sys
import time
from dataclasses import dataclass
from typing import Any

# An event that brings text; quotes inside are escaped.
TEXT = re.compile(rb'"(?:text|content)": ?"([^"])')
FINISH = re.compile(rb'"finish_reason": ?"(\w+)"')
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
KEPT = 2000  # bytes of a refusal that are kept


class Reply:
    """What a server answers, understood as it comes: the bytes may be cut anywhere."""

    def __init__(self) -> None:
        self.status = 0
        self.times: list[float] = []  # when text came
        self.usage: int | None = None  # tokens written, if the server tells
        self.finish = ""
        self.done = False  # [DONE] was seen
        self.ended = False  # the body is complete
        self.error = ""
        self._raw = b""
        self._line = b""
        self._refusal = b""
        self._chunked = False
        self._length: int | None = None  # bytes of the body still to come, if that was said

    def feed(self, data: bytes, now: float) -> None:
        if self.ended:
            return
        self._raw = self._raw + data if self._raw else data
        if not self.status and not self._head():
            return
        if self._chunked:
            self._chunks(now)
        else:
            body, self._raw = self._raw, b""
            if self._length is not None:
                body = body[: self._length]
                self._length -= len(body)
                self.ended = self._length == 0
            self._body(body, now)

    def close(self) -> None:
        """The connection ended; a body without a length ends with it."""
        if self.status and not self._chunked and self._length is None:
            self.ended = True

    def count(self, most: int) -> tuple[int, str]:
        """Tokens written, and how that is known.

        A text that ended by its length has as many as were asked for, even where a character
        took several tokens and so fewer events than tokens came.
        """
        if self.usage is not None:
            return self.usage, "usage"
        if self.finish == "length":
            return most, "length"
        return len(self.times), "events"

    def failure(self) -> str:
        """Why this is not a complete answer; nothing if it is one."""
        if not self.status:
            return "the connection ended before an answer"
        if self.status != 200:
            words = self._refusal.decode("utf-8", "replace")
            return " ".join(f"status {self.status}: {words}".split())[:300]
        if self.error:
            return f"an error within the stream: {self.error}"[:300]
        if not self.done:
            return "the stream ended before [DONE]"
        return "" if self.times and self.usage != 0 else "no tokens came"

    def _head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            return False
        head, self._raw = self._raw[:end], self._raw[end + 4 :]
        found = STATUS.match(head)
        self.status = int(found[1]) if found else 999
        for line in head.lower().split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name == b"transfer-encoding" and b"chunked" in value:
                self._chunked = True
            elif name == b"content-length":
                self._length = int(value)
        self.ended = self._length == 0 and not self._chunked
        return True

    def _chunks(self, now: float) -> None:
        raw, at = self._raw, 0
        while not self.ended:
            line = raw.find(b"\r\n", at)
            if line < 0:
                break
            size = int(raw[at:line].split(b";")[0], 16)
            if size == 0:  # what may follow is of no interest
                self.ended = True
            elif len(raw) < line + size + 4:
                break
            else:
                self._body(raw[line + 2 : line + 2 + size], now)
                at = line + size + 4
        self._raw = raw[at:]

    def _body(self, data: bytes, now: float) -> None:
        if self.status != 200:
            self._refusal = (self._refusal + data)[:KEPT]
            return
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, event: bytes, now: float) -> None:
        brings = TEXT.search(event)
        if brings:
            self.times.append(now)
        elif event == b"[DONE]":
            self.done = True
            return
        finish = FINISH.search(event)
        if finish:
            self.finish = finish[1].decode()
        if not brings or b'"completion_tokens"' in event:
            self._read(event)

    def _read(self, event: bytes) -> None:
        """An event that a search does not explain."""
        try:
            found = json.loads(event)
            usage = found.get("usage") or {}
            self.usage = usage.get("completion_tokens", self.usage)
            if found.get("error"):
                self.error = json.dumps(found["error"])
        except (ValueError, AttributeError):
            self.error = f"not a JSON object: {event[:100]!r}"


class Asking(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, request: bytes, ended: asyncio.Future[None]) -> None:
        self.request, self.ended = request, ended
        self.reply = Reply()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        try:
            self.reply.feed(data, time.monotonic())
        except ValueError as error:
            self.reply.error = f"not HTTP: {error}"
            self._end()
        if self.reply.ended:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self.reply.close()
        self._end()

    def _end(self) -> None:
        self.transport.close()
        if not self.ended.done():
            self.ended.set_result(None)


@dataclass
class Load:
    """All clients of one job, and what became of their requests."""

    job: dict[str, Any]

    def __post_init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.not_begun = 0
        self.began = 0.0

    async def run(self) -> dict[str, Any]:
        texts = [[self._request(body) for body in bodies] for bodies in self.job["clients"]]
        self.began = self.job.get("began") or time.monotonic()
        await asyncio.sleep(self.began - time.monotonic())
        used = time.process_time()
        await asyncio.gather(*(self._client(n, mine) for n, mine in enumerate(texts)))
        used = time.process_time() - used
        return {"rows": self.rows, "not_begun": self.not_begun, "cpu_s": round(used, 4)}

    async def _client(self, number: int, requests: list[bytes]) -> None:
        for request in requests:
            if time.monotonic() - self.began > self.job["seconds"]:
                self.not_begun += 1
            else:
                self.rows.append(await self._ask(number, request))

    async def _ask(self, number: int, request: bytes) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        asking = Asking(request, ended)
        sent, failure = time.monotonic(), ""
        left = self.began + self.job["patience"] - sent
        try:
            async with asyncio.timeout(left):
                await loop.create_connection(lambda: asking, "127.0.0.1", self.job["port"])
                await ended
        except TimeoutError:
            failure = f"no end within {self.job['patience']} s"
        except OSError as error:
            failure = f"no connection: {error}"
        if failure and hasattr(asking, "transport"):
            asking.transport.abort()
        reply, now = asking.reply, time.monotonic()
        tokens, counted = reply.count(self.job["max_tokens"])
        return {
            "client": number,
            "sent": self._since(sent),
            "times": [self._since(moment) for moment in reply.times],
            "ended": self._since(now),
            "tokens": tokens,
            "counted": counted,
            "finish": reply.finish,
            "failure": failure or reply.failure(),
        }

    def _since(self, moment: float) -> float:
        return round(moment - self.began, 6)

    def _request(self, body: str) -> bytes:
        data = body.encode()
        head = (
            f"POST {self.job['path']} HTTP/1.1\r\nHost: 127.0.0.1:{self.job['port']}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
            "Accept: text/event-stream\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + data


def main() -> None:
    job = json.load(sys.stdin)
    gc.disable()  # a pause here would be taken for one of the server
    json.dump(asyncio.run(Load(job).run()), sys.stdout)


if __name__ == "__main__":
    main()
