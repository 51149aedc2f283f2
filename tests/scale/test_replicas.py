"""Replicas under Ray: one is killed, all are updated, and no process remains."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.batch_support import processes_below
from helpers.local_replicas import replica

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")

BODY = {"prompt": "The scheduler plans rows", "max_tokens": 12, "seed": 7, "temperature": 0.9,
        "unspool": {"end": False}}  # fmt: skip
LONG = {"max_tokens": 200, "stream": True, "end": False}


class Asking:
    """A client that sends requests all the time, and its responses."""

    def __init__(self, url: str) -> None:
        self.url, self.responses, self.stopped = url, list[httpx.Response](), threading.Event()
        self.thread = threading.Thread(target=self._ask)
        self.thread.start()

    def _ask(self) -> None:
        with httpx.Client(base_url=self.url, timeout=60) as client:
            number = 0
            while not self.stopped.is_set():
                number += 1
                body = {**BODY, "prompt": f"{number} pages", "max_tokens": 4}
                self.responses.append(client.post("/v1/completions", json=body))

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.thread.join()


class Writing:
    """A branch that is being generated, with a reader."""

    def __init__(self, client: httpx.Client, pace: float = 80) -> None:
        branch = client.post("/v1/tree", json={"prompt": f"page {time.monotonic()}"})
        self.id = branch.json()["id"]
        self.replica = self.id.split("-")[1]
        self.client, self.pace = client, pace
        self.text, self.started = "", threading.Event()
        self.thread = threading.Thread(target=self._read)
        self.thread.start()
        assert self.started.wait(60)

    def _read(self) -> None:
        path = f"/v1/tree/{self.id}/resume"
        with self.client.stream("POST", path, json={**LONG, "pace": self.pace}) as answer:
            for piece in answer.iter_text():
                self.text += piece
                self.started.set()
        self.started.set()

    def end(self) -> str:
        self.thread.join(60)
        return self.text


def until(happened: Callable[[], Any], seconds: float = 90.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(httpx.HTTPError):
            if result := happened():
                return result
        time.sleep(0.1)
    raise AssertionError("timeout")


def names(client: httpx.Client) -> set[str]:
    answer = client.get("/ready")
    return set(answer.json()["replicas"]) if answer.status_code == 200 else set()


@pytest.mark.ray
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
def test_a_server_of_two_replicas_of_which_one_is_killed(chatty: Path, tmp_path: Path):
    command = [sys.executable, "-m", "unspool", "serve", "--replicas", "2", "--port", "0"]
    command += ["--model", f"tiny={chatty}", "--cache-memory", str(8 << 20), "--drain", "5"]
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr)
    try:
        line = until(lambda: next((x for x in log.read_text().splitlines() if "started" in x), ""))
        url = json.loads(line)["address"]
        with httpx.Client(base_url=url, timeout=60) as client:
            _ask_and_kill(url, client, chatty, process.pid)
        processes = processes_below(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        until(lambda: not [pid for pid in processes if Path(f"/proc/{pid}").exists()], 30)
        assert "Traceback" not in log.read_text() and "raylet" not in log.read_text()
    finally:
        process.kill()
        process.wait()


def _ask_and_kill(url: str, client: httpx.Client, chatty: Path, process: int) -> None:
    replicas = names(client)
    assert len(replicas) == 2
    with replica(chatty, "") as bare:
        plain = httpx.post(f"{bare.url}/v1/completions", json=BODY, timeout=60).json()
    for session in range(4):
        answer = client.post(
            "/v1/completions", json=BODY, headers={"x-session-id": f"session {session}"}
        )
        assert answer.json()["choices"][0]["text"] == plain["choices"][0]["text"]
    writing = [Writing(client) for _ in range(4)]
    assert {branch.replica for branch in writing} == replicas
    with Asking(url) as requests:
        time.sleep(0.3)
        killed = processes_below(process, "Replica")[0]
        subprocess.run(["kill", "-9", str(killed)], check=True)
        texts = {branch.id: branch.end() for branch in writing}
        broken = {branch.replica for branch in writing if "replica_lost" in texts[branch.id]}
        assert len(broken) == 1, texts
        (lost,) = broken
        for branch in writing:
            is_lost = branch.replica == lost
            assert ("send the request again" in texts[branch.id]) == is_lost
            answer = client.get(f"/v1/tree/{branch.id}")
            assert answer.status_code == (410 if is_lost else 200)
        until(lambda: len(names(client) - {lost}) == 2)  # Ray has started another one
    assert {answer.status_code for answer in requests.responses} == {200}
    text = client.get("/metrics").text
    assert f'replica="{lost}"' not in text
    assert text.count("unspool_sequences_running{replica=") == 2


@pytest.mark.slow  # a second Ray: half a minute
def test_an_update_lets_what_runs_finish(chatty: Path, ray_here: str):
    """Deploy replicas and gateway as a serve.yaml does, then deploy an update."""
    from ray import serve

    from unspool.scale.replicas.application import build_gateway, build_replicas

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {"memory": 8 << 20, "threads": 1}
    args: dict[str, Any] = {
        "models": [{"model": f"tiny={chatty}", "options": options}],
        "settings": {"drain": 30.0},
    }
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
    try:
        serve.run(build_gateway({"settings": {"port": port}}), name="gateway", route_prefix="/")
        serve.run(build_replicas(args), name="replicas", route_prefix=None)
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=60) as client:
            (before,) = until(lambda: names(client))
            writing = Writing(client, pace=20)  # so that it outlasts the start of another replica
            with Asking(url) as requests:
                changed = {**args, "settings": {**args["settings"], "max_running": 32}}
                serve.run(build_replicas(changed), name="replicas", route_prefix=None)
                (after,) = until(lambda: names(client) - {before} and names(client))
                end = writing.end()
            assert after != before
            assert '"finish_reason":"length"' in end
            assert "event: error" not in end and "replica_lost" not in end
            statuses = {answer.status_code for answer in requests.responses}
            assert statuses == {200}, [a.text for a in requests.responses if a.status_code != 200]
            assert client.get(f"/v1/tree/{writing.id}").status_code == 410
    finally:
        serve.shutdown()
