"""Clients of an HTTP server in one process: python bench/lib/load.py < job.json

The job, on stdin:
    {"port": 8000, "path": "/v1/completions", "max_tokens": 64, "seconds": 120, "patience": 600,
     "clients": [["body", "body"], ["body"]], "began": 1234.5}
Each client sends its bodies one after the other. `began` is an optional start time (system
monotonic clock) by which several processes start together. No request starts after `seconds`;
those that still run after `patience` seconds have failed. The answer, on stdout:
    {"rows": [{"client": 0, "sent": 0.0, "times": [0.2, 0.3], "ended": 0.3, "tokens": 2,
               "counted": "usage", "finish": "length", "failure": ""}],
     "not_begun": 0, "cpu_s": 0.1}
Times are seconds since the start; `times` are those of events with text.

It shares the cores with the server, so it is cheap: only the standard library, one thread,
callbacks instead of streams, and no JSON parsing where a search is enough.
"""

import asyncio
import gc
import json
import re
import sys
import time
from typing import Any

TEXT = re.compile(rb'"(?:text|content)": ?"([^"])')  # not empty; quotes inside are escaped
FINISH = re.compile(rb'"finish_reason": ?"(\w+)"')
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")


class Reply:
    """Parser of a streamed response; the bytes may be cut anywhere."""

    def __init__(self) -> None:
        self.status = 0
        self.times: list[float] = []  # of events with text
        self.usage: int | None = None  # tokens written, if the server reports them
        self.finish = self.error = ""
        self.done = self.ended = False  # [DONE] received; body complete
        self._raw = self._line = self._refusal = b""
        self._chunked = False
        self._length: int | None = None  # missing bytes of the body, if known

    def feed(self, data: bytes, now: float) -> None:
        if self.ended:
            return
        self._raw = self._raw + data if self._raw else data
        if not self.status and not self._parse_head():
            return
        if self._chunked:
            self._parse_chunks(now)
            return
        body, self._raw = self._raw, b""
        if self._length is not None:
            body = body[: self._length]
            self._length -= len(body)
            self.ended = self._length == 0
        self._parse_body(body, now)

    def close(self) -> None:
        """Handle the end of the connection, which ends a body without a length."""
        if self.status and not self._chunked and self._length is None:
            self.ended = True

    def count(self, max_tokens: int) -> tuple[int, str]:
        """Number of tokens, and how it is known.

        A text that ended by length has `max_tokens`, also if a character took several tokens and
        there were fewer events.
        """
        if self.usage is not None:
            return self.usage, "usage"
        return (max_tokens, "length") if self.finish == "length" else (len(self.times), "events")

    def failure(self) -> str:
        """Why this is not a complete response; empty if it is."""
        if not self.status:
            return "the connection ended before an answer"
        if self.status != 200:
            text = self._refusal.decode("utf-8", "replace")
            return " ".join(f"status {self.status}: {text}".split())[:300]
        if self.error:
            return f"an error within the stream: {self.error}"[:300]
        if not self.done:
            return "the stream ended before [DONE]"
        return "" if self.times and self.usage != 0 else "no tokens came"

    def _parse_head(self) -> bool:
        head, separator, body = self._raw.partition(b"\r\n\r\n")
        if not separator:
            return False
        self._raw = body
        match = STATUS.match(head)
        self.status = int(match[1]) if match else 999
        for line in head.lower().split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name == b"transfer-encoding" and b"chunked" in value:
                self._chunked = True
            elif name == b"content-length":
                self._length = int(value)
        self.ended = self._length == 0 and not self._chunked
        return True

    def _parse_chunks(self, now: float) -> None:
        raw, start = self._raw, 0
        while not self.ended:
            line = raw.find(b"\r\n", start)
            if line < 0:
                break
            size = int(raw[start:line].split(b";")[0], 16)
            if size == 0:
                self.ended = True
            elif len(raw) < line + size + 4:
                break
            else:
                self._parse_body(raw[line + 2 : line + 2 + size], now)
                start = line + size + 4
        self._raw = raw[start:]

    def _parse_body(self, data: bytes, now: float) -> None:
        if self.status != 200:
            self._refusal = (self._refusal + data)[:2000]
            return
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._parse_event(line[5:].strip(), now)

    def _parse_event(self, event: bytes, now: float) -> None:
        has_text = TEXT.search(event)
        if has_text:
            self.times.append(now)
        elif event == b"[DONE]":
            self.done = True
            return
        finish = FINISH.search(event)
        if finish:
            self.finish = finish[1].decode()
        if has_text and b'"completion_tokens"' not in event:
            return
        try:
            parsed = json.loads(event)
            self.usage = (parsed.get("usage") or {}).get("completion_tokens", self.usage)
            if parsed.get("error"):
                self.error = json.dumps(parsed["error"])
        except (ValueError, AttributeError):
            self.error = f"not a JSON object: {event[:100]!r}"


class RequestProtocol(asyncio.Protocol):
    """One request on one connection."""

    def __init__(self, request: bytes, ended: asyncio.Future[None]) -> None:
        self.request, self.ended = request, ended
        self.reply = Reply()

    def connection_made(self, transport: Any) -> None:
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


class Load:
    """All clients of one job and their results."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.rows, self.not_begun = job, list[dict[str, Any]](), 0

    async def run(self) -> dict[str, Any]:
        requests = [[self._request(body) for body in bodies] for bodies in self.job["clients"]]
        self.start = self.job.get("began") or time.monotonic()
        await asyncio.sleep(self.start - time.monotonic())
        cpu = time.process_time()
        await asyncio.gather(*(self._run_client(n, r) for n, r in enumerate(requests)))
        cpu = time.process_time() - cpu
        return {"rows": self.rows, "not_begun": self.not_begun, "cpu_s": round(cpu, 4)}

    async def _run_client(self, number: int, requests: list[bytes]) -> None:
        for request in requests:
            if time.monotonic() - self.start > self.job["seconds"]:
                self.not_begun += 1
            else:
                self.rows.append(await self._ask(number, request))

    async def _ask(self, number: int, request: bytes) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        protocol = RequestProtocol(request, ended)
        sent_at, failure = time.monotonic(), ""
        try:
            async with asyncio.timeout(self.start + self.job["patience"] - sent_at):
                await loop.create_connection(lambda: protocol, "127.0.0.1", self.job["port"])
                await ended
        except TimeoutError:
            failure = f"no end within {self.job['patience']} s"
        except OSError as error:
            failure = f"no connection: {error}"
        if failure and hasattr(protocol, "transport"):
            protocol.transport.abort()
        reply = protocol.reply
        moments = [round(t - self.start, 6) for t in (sent_at, *reply.times, time.monotonic())]
        tokens, counted = reply.count(self.job["max_tokens"])
        return {
            "client": number, "sent": moments[0], "times": moments[1:-1], "ended": moments[-1],
            "tokens": tokens, "counted": counted, "finish": reply.finish,
            "failure": failure or reply.failure(),
        }  # fmt: skip

    def _request(self, body: str) -> bytes:
        data = body.encode()
        head = (
            f"POST {self.job['path']} HTTP/1.1\r\nHost: 127.0.0.1:{self.job['port']}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
            "Accept: text/event-stream\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + data


if __name__ == "__main__":
    job = json.load(sys.stdin)
    gc.disable()  # a pause here would count as one of the server
    json.dump(asyncio.run(Load(job).run()), sys.stdout)
