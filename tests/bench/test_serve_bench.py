"""The comparison of servers: parsing of streams, failures, percentiles, table."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import serve
from helpers import fake_server
from lib import servers
from lib.load import Load, Reply
from lib.servers import client_figures
from lib.stats import percentile

ASKED = {"max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
FAKE = (sys.executable, str(Path(fake_server.__file__)), "{port}")


def stream(mode: str = "") -> bytes:
    parts = fake_server.events(ASKED, mode)
    if mode == "plain":
        return fake_server.PLAIN + b"".join(parts)
    chunks = [b"%x;name=value\r\n%s\r\n" % (len(part), part) for part in parts]
    return fake_server.CHUNKED + b"".join(chunks) + b"0\r\n\r\n"


def load(*clients: list[str], patience: float = 20, seconds: float = 20) -> dict[str, Any]:
    """What clients with these prompts see of the fake server."""

    async def run() -> dict[str, Any]:
        server = await asyncio.start_server(fake_server.answer, "127.0.0.1", 0)
        bodies = [[json.dumps({**ASKED, "prompt": text}) for text in mine] for mine in clients]
        job = {"port": server.sockets[0].getsockname()[1], "path": "/v1/completions"}
        job |= {"max_tokens": 5, "patience": patience, "seconds": seconds, "clients": bodies}
        result = await Load(job).run()
        server.close()
        return result

    return asyncio.run(run())


@pytest.mark.parametrize("mode", ["", "plain", "untold"])
def test_a_stream_may_be_cut_anywhere(mode: str) -> None:
    data = stream(mode)
    rng = random.Random(1)
    cuts = [[at] for at in range(1, len(data))]
    cuts += [sorted(rng.sample(range(1, len(data)), 9)) for _ in range(100)]
    cuts.append(list(range(1, len(data))))
    for places in cuts:
        reply = Reply()
        for moment, (a, b) in enumerate(zip([0, *places], [*places, len(data)], strict=True)):
            reply.feed(data[a:b], moment)
        reply.close()
        assert (reply.failure(), reply.ended, reply.finish) == ("", True, "length")
        assert len(reply.times) == 5 and reply.times == sorted(reply.times)
        assert reply.count(5) == (5, "length" if mode == "untold" else "usage")


def test_tokens_are_counted_from_events_without_usage() -> None:
    reply = Reply()
    reply.feed(stream("untold").replace(b"length", b"stop.."), 1.0)
    assert reply.count(64)[0] == 5


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "the connection ended before an answer"),
        (fake_server.CHUNKED, "the stream ended before [DONE]"),
        (stream("cut"), "the stream ended before [DONE]"),
        (stream("empty"), "no tokens came"),
        (stream("error"), 'an error within the stream: {"message": "out of memory"}'),
        (stream().replace(b'{"choices": []', b'["choices": []'), "an error within the stream: not"),
        (
            fake_server.complete_reply("503 Busy", {"error": "busy"}),
            'status 503: {"error": "busy"}',
        ),
        (b"SSH-2.0\r\n\r\n", "status 999"),
    ],
)
def test_incomplete_answers_have_a_reason(data: bytes, why: str) -> None:
    reply = Reply()
    reply.feed(data, 1.0)
    reply.close()
    assert reply.failure().startswith(why)


def test_every_request_is_counted() -> None:
    modes = ["a", "refuse", "b", "cut", "error", "silent", "empty", "plain", "untold"]
    result = load(["a", "refuse", "b"], *([mode] for mode in modes[3:]), patience=1)
    assert len(result["rows"]) == len(modes) and result["not_begun"] == 0
    point = client_figures(result)
    assert (point["requests"], point["failed"], point["tokens"]) == (9, 5, 20)
    reasons = sorted(point["failures"])
    for start in ("an error", "no end within", "no tokens", "status 429", "the stream ended"):
        assert sum(reason.startswith(start) for reason in reasons) == 1
    assert point["lengths"] == [5] and point["tokens_s"] > 0
    for row in result["rows"]:
        if not row["failure"]:
            assert 0 <= row["sent"] <= row["times"][0] <= row["times"][-1] <= row["ended"]


def test_a_client_waits_for_its_answer_and_respects_the_time_limit() -> None:
    rows = load(["a", "b", "c"])["rows"]
    assert all(later["sent"] >= row["ended"] for row, later in pairwise(rows))
    result = load(["silent", "b", "c"], patience=0.1, seconds=0.05)
    assert (len(result["rows"]), result["not_begun"]) == (1, 2)


def test_a_missing_server_is_a_failure() -> None:
    job = {"port": servers.free_port(), "path": "/", "max_tokens": 5, "patience": 5, "seconds": 5}
    point = client_figures(asyncio.run(Load({**job, "clients": [["{}"], ["{}"]]}).run()))
    assert point["failed"] == point["requests"] == 2
    assert point["tokens_s"] is None and point["first_s_p99"] is None


def test_percentiles_are_measured_values() -> None:
    values = list(range(1, 201))
    assert [percentile(values, share) for share in (0, 50, 99, 100)] == [1, 100, 198, 200]
    assert percentile([3.0, 1.0, 2.0], 99) == 3.0 and percentile([], 50) is None


def test_a_server_starts_answers_and_stops(tmp_path: Path) -> None:
    server = servers.Server("fake", "fake", FAKE, {"stream_options": {"include_usage": True}})
    with closing(servers.RunningServer(server, dict(os.environ), tmp_path / "said")) as running:
        assert running.name == "fake"
        running.pause()
        running.resume()
        assert running.ask("hello", 7)["usage"]["completion_tokens"] == 7
        rows = running.load([["a"], ["b"]], 7, 5, 5)["rows"]
        assert [(row["tokens"], row["failure"]) for row in rows] == [(7, "")] * 2
        several = running.load([[f"{n}"] for n in range(5)], 7, 20, 20, processes=2)["rows"]
        assert sorted(row["client"] for row in several) == list(range(5))
        assert all(row["tokens"] == 7 and not row["failure"] for row in several)
        assert servers.CoreSeconds.now(running.process.pid).total > 0
        running.pause()  # a server that is kept still can be stopped, too
    assert running.process.returncode is not None
    broken = servers.Server("broken", "broken", (sys.executable, "-c", "raise OSError('no port')"))
    with pytest.raises(servers.ServerError, match="status 1: OSError: no port"):
        servers.RunningServer(broken, dict(os.environ), tmp_path / "said")


def test_the_cost_of_serving_is_measured_with_the_null_model(
    run_bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    options = ["--clients", "1,2", "--tokens", "5", "--step-ms", "1", "--out", tmp_path]
    assert run_bench(serve, "--device", "null", *options) == 0
    points = json.loads((tmp_path / "streams.json").read_text("utf-8"))
    assert [points[clients]["tokens"] for clients in ("1", "2")] == [5, 10]
    output = capsys.readouterr().out
    assert "| 2 |" in output and "HTTP, CPU µs per token" in output


def results() -> dict[str, Any]:
    names = [f"{kind}_{p}" for kind in serve.LATENCIES for p in ("p50", "p99")]

    def point(speed: float, wait: float, **changes: Any) -> dict[str, Any]:
        figures = {"tokens_s": speed, **dict.fromkeys(names, wait), "requests": 4, "failed": 0}
        rest = {"failures": {}, "not_begun": 0, "lengths": [64], "others": 0.0}
        return {**figures, **rest, **changes}

    lost = point(50, 3, failed=1, failures={"status 503: busy": 1}, not_begun=2, others=0.2)
    return {
        "machine": {"processor": "p", "architecture": "a", "cores": 2},
        "model": "m", "prompt": 64, "threads": 2, "rounds": 2, "tokens": 64, "clients": [16],
        "requests": 4, "seconds": 9,
        "servers": {
            "us": {"title": "us", "failed": []},
            "llama_cpp": {"title": "llama", "failed": [], "check": {"streamed": 3, "whole": 4}},
        },
        "points": {
            "us": {"16": [point(100, 1), None, point(120, 1)]},
            "llama_cpp": {"16": [lost, point(1, 1), point(40, 2)]},
        },
        "bare": {"server": [90.0, 95.0], "engine": [100.0, 100.0], "llama_cpp": [45.0, 50.0]},
    }  # fmt: skip


def test_the_table_has_ratios_within_a_round_and_failures() -> None:
    table = serve.markdown(json.loads(json.dumps(results())))
    assert "| 16 | 2.50x (2.00 to 3.00) | 2.50x (2.00 to 3.00) |" in table
    assert "100 in process without it: 0.93x (0.90 to 0.95)" in table
    assert "our server has 1.95x (1.90 to 2.00)" in table
    assert "llama, 16 clients: 1 failed: status 503: busy" in table
    assert "llama, 16 clients: 2 requests not started within 9 s" in table
    assert "other processes used 20% of the cores" in table and "do not trust" in table
    assert serve.draw(results()).startswith("<svg")


def test_wrong_numbers_are_refused(run_bench, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_bench(serve, "--clients", "few")
    assert "'few' is not a list such as 1,4,16" in capsys.readouterr().err
