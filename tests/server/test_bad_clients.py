"""Clients that vanish, stall, flood or lie: nothing leaks, and nobody else is harmed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.running_server import Running, default_entry, running, settled
from unspool.server.runtime.registry import ModelEntry

PROMPT = "Once upon a time"
LONG = {"prompt": PROMPT, "max_tokens": 2000, "unspool": {"end": False}}


def body_of(**params: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 16, "seed": 1, **params}


def raw(server: Running, data: bytes) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    result = socket.create_connection((host, int(port)), timeout=10)
    result.sendall(data)
    return result


def posted(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json",
             f"Content-Length: {len(body)}", *headers]  # fmt: skip
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


# -- those who leave -------------------------------------------------------------------------


def test_a_client_that_leaves_frees_its_work_within_a_step(server):
    for stream in (True, False):
        body = json.dumps({**LONG, "stream": stream}).encode()
        lm = server.state.registry.loaded[server.model].lm
        closed = raw(server, posted("/v1/completions", body))
        before, until = lm.engine.steps, time.monotonic() + 10
        while lm.engine.steps < before + 5 and time.monotonic() < until:
            time.sleep(0.005)
        assert server.state.admission.running == 1
        closed.close()
        runs, remaining = lm.engine.steps, time.monotonic()
        while server.state.admission.running:
            assert time.monotonic() - remaining < 60
            time.sleep(0.002)
        assert lm.engine.steps - runs < 1000  # of the 2,000 that were asked for
        settled(server)


class Crowd:
    """Clients that connect and vanish at random moments, and others that want their texts."""

    def __init__(self, server: Running, lm: Any, seed: int) -> None:
        self.server, self.chance = server, random.Random(seed)
        self.num_logits = {n: lm.generate(PROMPT, seed=n, max_tokens=16).text for n in range(8)}

    def visit(self, vanishing: int, staying: int, at_once: int) -> None:
        asyncio.run(self._visit(vanishing, staying, at_once))
        settled(self.server, 60)

    async def _visit(self, vanishing: int, staying: int, at_once: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        places = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(
            base_url=self.server.url, timeout=120, limits=limits
        ) as client:
            work = [self._vanish(client, places) for _ in range(vanishing)]
            work += [self._stay(client, places, number % 8) for number in range(staying)]
            self.chance.shuffle(work)
            await asyncio.gather(*work)

    async def _vanish(self, client: httpx.AsyncClient, places: asyncio.Semaphore) -> None:
        chance = self.chance
        body = body_of(max_tokens=200, stream=chance.random() < 0.7, n=chance.choice((1, 1, 3)))
        async with places:
            with contextlib.suppress(TimeoutError):
                moment = chance.choice((0.002, 0.02, 0.2, 0.6)) * chance.random()
                await asyncio.wait_for(client.post("/v1/completions", json=body), moment)

    async def _stay(self, client: httpx.AsyncClient, places: asyncio.Semaphore, seed: int) -> None:
        async with places:
            answer = await client.post("/v1/completions", json=body_of(seed=seed))
            assert answer.json()["choices"][0]["text"] == self.num_logits[seed]


def test_many_vanish_and_those_who_stay_get_their_texts(server, lm):
    Crowd(server, lm, seed=3).visit(vanishing=60, staying=8, at_once=68)


@pytest.mark.slow
def test_five_hundred_vanish_and_memory_stays_flat(server, lm):
    """With slow readers and half-open connections among them, which never take part."""
    body = json.dumps({**LONG, "stream": True}).encode()
    deaf = [raw(server, posted("/v1/completions", body)) for _ in range(4)]
    half = [raw(server, b"POST /v1/completions HTTP/1.1\r\nHost: loc") for _ in range(20)]
    crowd = Crowd(server, lm, seed=5)
    resident: list[int] = []
    for _ in range(5):
        asyncio.run(crowd._visit(vanishing=100, staying=16, at_once=50))
        resident.append(resident_bytes())
    for item in (*deaf, *half):
        item.close()
    settled(server, 60)
    assert max(resident[1:]) - resident[0] < 32 << 20, resident


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_who_waits_in_line_and_leaves_is_forgotten(default_model):
    entry = default_entry(default_model, memory=64 << 20)
    with running([entry], max_running=1, max_queued=2) as server:
        body = json.dumps({**LONG, "stream": True}).encode()
        first = raw(server, posted("/v1/completions", body))
        first.recv(100)
        waiting = [raw(server, posted("/v1/completions", body)) for _ in range(2)]
        until = time.monotonic() + 10
        while server.state.admission.queued < 2 and time.monotonic() < until:
            time.sleep(0.01)
        full = httpx.post(f"{server.url}/v1/completions", json=body_of())
        assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
        assert full.json()["error"]["code"] == "queue_full"
        for item in waiting:
            item.close()
        while server.state.admission.queued and time.monotonic() < until:
            time.sleep(0.01)
        assert server.state.admission.queued == 0
        first.close()
        assert httpx.post(f"{server.url}/v1/completions", json=body_of()).status_code == 200
        several = httpx.post(f"{server.url}/v1/completions", json=body_of(prompt=["a", "b", "c"]))
        assert len(several.json()["choices"]) == 3  # one after the other
        too_many = httpx.post(f"{server.url}/v1/completions", json=body_of(n=2))
        assert too_many.status_code == 400
        settled(server)


def test_deadlines_slow_readers_and_half_requests(default_model):
    entry = default_entry(default_model, memory=64 << 20)
    with running([entry], deadline=1.0, body_seconds=0.5) as server:
        late = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=30)
        assert late.status_code == 504 and late.json()["error"]["type"] == "timeout_error"
        lines = httpx.post(
            f"{server.url}/v1/completions", json={**LONG, "stream": True}, timeout=30
        ).text.strip().split("\n\n")  # fmt: skip
        assert "timed out" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
        # One that never reads, one that sends half a head, one that sends half a body.
        body = json.dumps({**LONG, "stream": True}).encode()
        deaf = raw(server, posted("/v1/completions", body))
        half_head = raw(server, b"POST /v1/completions HTTP/1.1\r\nHost: loc")
        half_body = raw(server, posted("/v1/completions", b'{"prompt": "a"}')[:-5])
        until = time.monotonic() + 60
        while not server.state.admission.running and time.monotonic() < until:
            time.sleep(0.01)
        server.state.settings = replace(server.state.settings, deadline=20.0)  # from now on
        answer = httpx.post(f"{server.url}/v1/completions", json=body_of(), timeout=30)
        assert answer.status_code == 200
        assert half_body.recv(1000).startswith(b"HTTP/1.1 408")
        assert half_head.recv(1000) == b""  # hung up on
        settled(server, 60)
        for item in (deaf, half_head, half_body):
            item.close()


# -- those who send what they should not -----------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "body"),
        (b"{", "not JSON"),
        (b"null", "JSON object"),
        (b"[]", "JSON object"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"prompt": "a", "temperature": 1e999}', ""),
        (b'{"prompt": "a", "max_tokens": 1e30}', "max_tokens"),
        (b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}", "seed"),
        (b'{"prompt": "a", "seed": ' + b"9" * 9000 + b"}", "not JSON"),
        (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", ""),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
        (b'{"prompt": "half \\ud800 a character"}', ""),
        (b'{"prompt": "a", "unspool": {"regex": "("}}', "regex"),
        (b'{"prompt": "a", "unspool": {"regex": "(((a{1,99}){1,99}){1,99}){1,99}"}}', "regex"),
        (b'{"prompt": "a", "unspool": {"guard": "pattern=(?=a)b"}}', "look-around"),
        (b'{"prompt": "a", "unspool": {"grammar": "root ::= root root"}}', ""),
        (b'{"prompt": "a", "unspool": {"json_schema": {"$ref": "file:///etc/passwd"}}}', ""),
        (b'{"prompt": "a", "unspool": {"json_schema": {"$ref": "http://127.0.0.1:1/x"}}}', ""),
        (b'{"prompt": "a", "chat_template": "{{ 1 }}"}', "chat_template"),
        (b'{"prompt": "a", "model": "../../etc/passwd"}', "no such model"),
        (b'{"prompt": "a", "unspool": {"guard": "ban=' + b"a|" * 9000 + b'"}}', "guard"),
        (b'{"prompt": "a", "unspool": {"dry_breakers": [[1e30]], "dry_multiplier": 1}}', "dry"),
        (
            b'{"prompt": "a", "logit_bias": {'
            + b",".join(b'"%d": 1' % i for i in range(2000))
            + b"}}",
            "at most 1024",
        ),
    ],
)
def test_bad_bodies_get_a_clear_answer(server, body, words):
    answer = httpx.post(f"{server.url}/v1/completions", content=body, timeout=30,
                        headers={"content-type": "application/json"})  # fmt: skip
    assert answer.status_code in (400, 404)
    error = answer.json()["error"]
    assert words in error["message"] and error["type"] in (
        "invalid_request_error",
        "not_found_error",
    )
    assert set(error) == {"message", "type", "param", "code"}


def test_a_web_page_must_call_its_body_json(server):
    """A page elsewhere may send plain text anywhere without asking; so that is not read. Who is no
    browser names no origin, and forgets the type, as `curl -d` does."""
    ask = {"url": f"{server.url}/v1/completions", "content": b'{"prompt": "a", "max_tokens": 1}'}
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        for page in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
            answer = httpx.post(**ask, headers={"content-type": kind} | page)
            assert answer.status_code == 403
            assert "application/json" in answer.json()["error"]["message"]
        assert httpx.post(**ask, headers={"content-type": kind}, timeout=60).status_code == 200


def test_bodies_that_are_too_large(default_model, server):
    large = httpx.post(f"{server.url}/v1/completions", content=b" " * (5 << 20),
                       headers={"content-type": "application/json"})  # fmt: skip
    assert large.status_code == 413

    def pieces():
        for _ in range(50):
            yield b" " * 100_000

    try:
        chunked = httpx.post(f"{server.url}/v1/completions", content=pieces(),
                             headers={"content-type": "application/json"})  # fmt: skip
        assert chunked.status_code == 413
    except httpx.WriteError:
        pass  # it hung up on us in the middle, which is an answer too


def test_explosive_schemas_hold_up_nobody(server):
    """While schemas that are hard to compile come in, a stream's tokens keep flowing."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(9):
        deep = {"anyOf": [{"type": "object", "properties": {"a": deep, "b": deep}}, deep]}
    wide = {
        f"p{i}": {"type": "string", "pattern": f"^(a|b|ab){{{i},{i + 90}}}$"} for i in range(150)
    }
    schemas = [deep, {"type": "object", "properties": wide, "required": [*wide]},
               {"enum": [f"{i}" * 50 for i in range(1500)]}]  # fmt: skip
    statuses: list[int] = []
    took: list[float] = []

    def attack() -> None:
        for schema in schemas:
            began = time.monotonic()
            body = body_of(max_tokens=4, unspool={"json_schema": schema})
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            statuses.append(answer.status_code)
            took.append(time.monotonic() - began)

    gaps: list[float] = []
    thread = threading.Thread(target=attack)
    with httpx.stream("POST", f"{server.url}/v1/completions", timeout=60,
                      json={**LONG, "max_tokens": 400, "stream": True}) as answer:  # fmt: skip
        lines = answer.iter_lines()
        next(lines)
        thread.start()
        last = time.monotonic()
        for line in lines:
            if line:
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
            if not thread.is_alive():
                break
    thread.join()
    assert all(status in (200, 400) for status in statuses) and len(statuses) == 3
    # Not a measure of speed: only that nothing stood still while a schema was compiled.
    assert max(gaps) < max(3.0, max(took) / 2)
    settled(server)


def test_templates_cannot_be_attacked_through_messages(server, lm):
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for i in range(10**9) %}{% endfor %}"
    answer = httpx.post(f"{server.url}/apply-template",
                        json={"messages": [{"role": "user", "content": attack}]})  # fmt: skip
    assert attack in answer.json()["prompt"]


# -- who may ask -----------------------------------------------------------------------------


def test_keys_hosts_and_origins(default_model: Path):
    entry = default_entry(default_model, memory=64 << 20)
    keys, body = ("first-secret-key", "second-secret-key"), body_of(max_tokens=1)
    with running([entry], api_keys=keys, cors=("https://page.example",)) as server:
        url = f"{server.url}/v1/completions"
        for headers in ({}, {"authorization": "Bearer wrong-key-here"}, {"x-api-key": ""},
                        {"authorization": "Bearer first-secret-ke"}):  # fmt: skip
            refused = httpx.post(url, json=body, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        for headers in ({"authorization": f"Bearer {keys[0]}"}, {"x-api-key": keys[1]}):
            assert httpx.post(url, json=body, headers=headers).status_code == 200
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        assert httpx.get(f"{server.url}/health").status_code == 200
        asks = {"origin": "https://page.example", "access-control-request-method": "POST",
                "access-control-request-headers": "authorization,content-type"}  # fmt: skip
        allowed = httpx.options(url, headers=asks)
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        other = httpx.options(url, headers={**asks, "origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_a_server_without_a_key_answers_only_to_its_own_name(server):
    url = f"{server.url}/v1/models"
    evil = httpx.get(url, headers={"host": "evil.example"})
    assert evil.status_code == 403 and "localhost" in evil.json()["error"]["message"]
    assert httpx.get(url, headers={"host": "localhost:1234"}).status_code == 200
    origin = httpx.get(url, headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in origin.headers


def test_who_runs_out_of_time_in_line_leaves_nothing_behind(default_model):
    entry = default_entry(default_model, memory=64 << 20)
    with running([entry], max_running=1) as server:
        usual = server.state.settings
        url = f"{server.url}/v1/completions"
        first = raw(
            server, posted("/v1/completions", json.dumps({**LONG, "stream": True}).encode())
        )
        first.recv(100)
        server.state.settings = replace(usual, deadline=0.5)  # for those who come from now on
        late = httpx.post(url, json=body_of(), timeout=30)
        assert late.status_code == 504
        server.state.settings = usual
        first.close()
        settled(server)
        assert httpx.post(url, json=body_of(), timeout=30).status_code == 200


# -- several models --------------------------------------------------------------------------


def test_who_leaves_while_a_model_is_loaded_does_not_stop_it(default_model: Path):
    usual = default_entry(default_model, "one", memory=32 << 20)
    loads: list[float] = []

    def slowly() -> Any:
        loads.append(time.monotonic())
        time.sleep(1.0)
        return usual.load()

    with running([usual, ModelEntry("two", slowly, usual.size)]) as server:
        body = json.dumps(body_of(model="two")).encode()
        closed = raw(server, posted("/v1/completions", body))
        until = time.monotonic() + 10
        while not loads and time.monotonic() < until:
            time.sleep(0.01)
        closed.close()
        answer = httpx.post(f"{server.url}/v1/completions", json=body_of(model="two"), timeout=60)
        assert answer.status_code == 200 and len(loads) == 1
        assert server.state.registry.loaded["two"].users == 0 == server.state.admission.running


def test_models_are_loaded_when_asked_for_and_make_room(default_model: Path):
    size = default_model.stat().st_size
    entries = [default_entry(default_model, name, memory=32 << 20) for name in ("one", "two")]
    with running(entries, room=int(size * 1.5)) as server:
        url, registry = f"{server.url}/v1/completions", server.state.registry
        assert [*registry.loaded] == ["one"]
        first = httpx.post(url, json=body_of(), timeout=60).json()
        assert first["model"] == "one"
        body = {**LONG, "max_tokens": 60, "stream": True}
        with httpx.stream("POST", url, json=body, timeout=60) as busy:
            lines = busy.iter_lines()
            next(lines)
            # The other one must wait until this text is finished; it is never closed under it.
            answers: list[Any] = []
            thread = threading.Thread(
                target=lambda: answers.append(
                    httpx.post(url, json=body_of(model="two"), timeout=60).json()
                )
            )
            thread.start()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        thread.join()
        assert answers[0]["choices"] == first["choices"] and answers[0]["model"] == "two"
        assert [*registry.loaded] == ["two"]
        assert httpx.post(url, json=body_of(), timeout=60).json()["choices"] == first["choices"]
        assert [*registry.loaded] == ["one"]
        models = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert {m["id"]: m["unspool"]["loaded"] for m in models} == {"one": True, "two": False}
