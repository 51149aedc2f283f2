"""A running server in a thread of this process, and the small model that most tests serve."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from unspool.server.app import create_app
from unspool.server.http import server as serving
from unspool.server.http.settings import ServerSettings
from unspool.server.http.sockets import bind_socket
from unspool.server.runtime.registry import ModelEntry, ModelRegistry
from unspool.server.runtime.state import ServerState


@dataclass
class Running:
    """A server that listens."""

    url: str
    state: ServerState
    stop: Any

    @property
    def model(self) -> str:
        return self.state.registry.first

    @functools.cached_property
    def http(self) -> httpx.Client:
        """A client of this server. It loads no certificates, which would take 30 ms."""
        url = self.url.replace("0.0.0.0", "127.0.0.1")
        return httpx.Client(base_url=url, timeout=60, verify=False)

    @property
    def pool(self) -> Any:
        """The pages of the first model."""
        return self.state.registry.loaded[self.model].lm.engine.tree.pool


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Poll until the condition is true, and return its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "the condition never became true"
        time.sleep(0.005)
    return value


def in_event_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine, for at most a minute."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), 60))

    return run


def settled(server: Running, seconds: float = 60.0) -> None:
    """Wait until no request runs, then check that every page is free but for the prefix cache."""
    registry = server.state.registry
    lm = registry.loaded[server.model].lm
    wait_until(
        lambda: (
            not (
                server.state.admission.running
                or any(served.users for served in registry.loaded.values())
                or len(lm.engine.scheduler)
            )
        ),
        seconds,
    )
    lm.engine.call(lambda: lm.engine.tree.index.clear())
    assert lm.engine.tree.pool.used == 0
    assert not lm.engine._waiting


def connect(server: Running, data: bytes = b"") -> socket.socket:
    """Open a connection, send raw bytes, and do not wait for an answer."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=60)
    client.sendall(data)
    return client


def raw_post(path: str, body: Any, *headers: str, length: int | None = None) -> bytes:
    """The bytes of a POST request; `length` is what it claims its body to be."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = len(content) if length is None else length
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json",
             f"Content-Length: {size}", *headers]  # fmt: skip
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


@contextlib.contextmanager
def running(
    entries: list[ModelEntry],
    *,
    room: int = 1 << 33,
    adapters: Any = None,
    app: Any = None,
    **settings: Any,
) -> Iterator[Running]:
    """A server in a thread of this process; with `app`, of this application instead of models."""
    expected = replace(ServerSettings(port=0, drain=2.0), **settings)
    bound, state = bind_socket(expected), None
    if app is None:
        registry = ModelRegistry(entries, model_memory=room, adapters=adapters)
        app, state = create_app(expected, registry)
    address: list[str] = []
    ready = threading.Event()

    def started(url: str) -> bool:
        address.append(url)
        ready.set()
        return True

    server = serving.Server(app, expected, on_stopping=lambda: None, on_started=started)

    def work() -> None:
        try:
            asyncio.run(server.serve([bound]))
        finally:
            ready.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(60) and address, "the server did not start"

    def stop() -> None:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()

    result = Running(address[0], state, stop)
    try:
        yield result
    finally:
        result.http.close()
        stop()


def default_entry(path: Path, name: str = "smollm", **options: Any) -> ModelEntry:
    import unspool

    return ModelEntry(name, lambda: unspool.load(path, **options), path.stat().st_size)


def write_small_default(path: Path, source: Path) -> Path:
    """Write a model of four tiny random layers with all other metadata of the GGUF file `source`.

    Vocabulary, chat template, context length and control tokens are those of the default model, so
    requests mean the same. It writes words of lower-case letters, but for "stop", which is a button
    of the page.
    """
    width, inner, layers, heads, kv_heads = 64, 128, 4, 4, 2
    sizes = {
        "embedding_length": width, "feed_forward_length": inner, "block_count": layers,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads,
        "rope.dimension_count": width // heads, "general.file_type": 0,
    }  # fmt: skip
    with source.open("rb") as file:
        data = bytearray(file.read(8 << 20))
    for name, size in sizes.items():
        end = data.index(name.encode() + struct.pack("<I", 4)) + len(name) + 4
        data[end : end + 4] = struct.pack("<I", size)
    start = data.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    (vocab_size,) = struct.unpack_from("<Q", data, start)
    is_word, start = np.zeros(vocab_size, bool), start + 8
    for token in range(vocab_size):
        (length,) = struct.unpack_from("<Q", data, start)
        piece = data[start + 8 : start + 8 + length].decode()
        is_word[token] = re.fullmatch("\u0120?[a-z]+", piece) and "stop" not in piece
        start += 8 + length
    rng = np.random.default_rng(0)

    def random(rows: int, columns: int, scale: float = 1.0) -> Any:
        return rng.standard_normal((rows, columns), np.float32) * scale / np.sqrt(columns)

    key_rows = width // heads * kv_heads
    tensors = {"token_embd": random(vocab_size, width, 8.0), "output_norm": np.ones(width)}
    for layer in (f"blk.{n}" for n in range(layers)):
        tensors |= {
            f"{layer}.attn_norm": np.ones(width), f"{layer}.ffn_norm": np.ones(width),
            f"{layer}.attn_q": random(width, width, 2), f"{layer}.attn_v": random(key_rows, width),
            f"{layer}.attn_k": random(key_rows, width, 2),
            f"{layer}.attn_output": random(width, width), f"{layer}.ffn_gate": random(inner, width),
            f"{layer}.ffn_up": random(inner, width), f"{layer}.ffn_down": random(width, inner),
        }  # fmt: skip
    tensors["output"] = random(vocab_size, width, 6.0) * np.where(is_word, 1.0, 0.4)[:, None]
    infos, body = b"", b""
    for name, values in tensors.items():
        shape = struct.pack(f"<I{values.ndim}Q", values.ndim, *reversed(values.shape))
        named = struct.pack("<Q", len(name) + 7) + f"{name}.weight".encode()
        infos += named + shape + struct.pack("<IQ", 0, len(body))  # 32-bit floats
        body += values.astype("<f4").tobytes()
    metadata = bytes(data[: data.index(b"token_embd.weight") - 8])
    head = metadata[:8] + struct.pack("<Q", len(tensors)) + metadata[16:] + infos
    path.write_bytes(head + bytes(-len(head) % 32) + body)
    return path
