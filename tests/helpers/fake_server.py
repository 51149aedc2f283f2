"""A server of text that has no model: python tests/helpers/fake_server.py PORT

What it does with a request is the first word of the prompt: `cut` ends the connection early,
`error` sends an error within the stream, `refuse` answers with 429, `silent` never ends, `empty`
writes nothing, `plain` sends the stream without chunks, `untold` tells no usage; any other word has
the text written.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


def event(what: object) -> bytes:
    return b"data: " + (what if isinstance(what, bytes) else json.dumps(what).encode()) + b"\n\n"


def events(body: dict[str, Any], mode: str) -> list[bytes]:
    """The stream of one request."""
    count = 0 if mode == "empty" else body["max_tokens"]
    words = ['"text": "data: \n'] * count  # what a careless search would take for more events
    choices = [{"choices": [{"text": word, "finish_reason": None}]} for word in words]
    messages = [event(choice) for choice in choices]
    if mode == "cut":
        return messages[: count // 2]
    if mode == "error":
        return [*messages[:1], event({"error": {"message": "out of memory"}}), event(b"[DONE]")]
    messages.append(event({"choices": [{"text": "", "finish_reason": "length"}], "usage": None}))
    if mode != "untold" and body.get("stream_options"):
        messages.append(event({"choices": [], "usage": {"completion_tokens": count}}))
    return [*messages, event(b"[DONE]")]


def complete_reply(status: str, what: dict[str, Any]) -> bytes:
    body = json.dumps(what).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.split("content-length:")[1].split()[0]) if "content-length:" in head else 0
    body = json.loads(await reader.readexactly(length) or "{}")
    mode = str(body.get("prompt", "")).split(" ")[0]
    if head.startswith("get"):
        writer.write(complete_reply("200 OK", {"data": [{"id": "fake"}]}))
    elif mode == "refuse":
        writer.write(
            complete_reply("429 Too Many Requests", {"error": {"message": "the queue is full"}})
        )
    elif not body["stream"]:
        writer.write(complete_reply("200 OK", {"usage": {"completion_tokens": body["max_tokens"]}}))
    else:
        writer.write(PLAIN if mode == "plain" else CHUNKED)
        for data in events(body, mode):
            writer.write(data if mode == "plain" else b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
        if mode == "silent":
            await asyncio.sleep(60)
        if mode not in ("plain", "cut"):
            writer.write(b"0\r\n\r\n")
    writer.close()


async def main() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
