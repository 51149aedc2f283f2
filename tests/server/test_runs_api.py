"""`/v1/runs`: trainings read, watched, started and stopped; and their checkpoints as models."""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import unspool
from helpers import training_run
from helpers.running_server import Running, running, wait_until
from unspool.errors import UnspoolError
from unspool.server.runtime import registry
from unspool.server.runtime.registry import ModelEntry
from unspool.train.data import sources
from unspool.train.routes import ControlRequest, RunLibrary, ServerTrainer, StartRequest, downsample
from unspool.train.running.runs import Run

STAND_IN = [sys.executable, str(Path(__file__).parent.parent / "helpers" / "stand_in_trainer.py")]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = tmp_path_factory.mktemp("runs")
    training_run.make_run(result, "speeches")
    training_run.make_run(result, "older", until=6, state="failed", error="the disk is full")
    return result


def entry(root: Path) -> ModelEntry:
    folder = root / "speeches" / "checkpoints" / "000200"
    return ModelEntry("first", lambda: unspool.load(folder, memory=8 << 20), 1000)


@pytest.fixture(scope="module")
def served(root: Path) -> Iterator[Running]:
    with running([entry(root)], runs=root) as result:
        yield result


def events(url: str, name: str, **query: int) -> Iterator[tuple[str, dict[str, Any]]]:
    address = f"{url}/v1/runs/{name}/events"
    with httpx.stream("GET", address, params=query, timeout=60) as answer:
        kind = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                kind = line[7:]
            elif line.startswith("data: "):
                yield kind, json.loads(line[6:])


# -- reading -----------------------------------------------------------------------------------


def test_runs_are_listed_and_told_in_full(served: Running, root: Path) -> None:
    result = httpx.get(f"{served.url}/v1/runs").json()
    assert result["folder"] == str(root) and result["may_start"] and result["starting"] is None
    runs = {run["name"]: run for run in result["data"]}
    assert runs["speeches"]["state"] == "done" and runs["speeches"]["last"]["step"] == 200
    assert runs["older"]["state"] == "failed" and runs["older"]["error"] == "the disk is full"

    reply = httpx.get(f"{served.url}/v1/runs/speeches").json()
    assert [saved["step"] for saved in reply["checkpoints"]] == [0, 2, 6, 20, 60, 200]
    assert all(saved["film"] for saved in reply["checkpoints"])
    assert reply["checkpoints"][1]["model"] == "speeches@2"
    assert len(reply["log"]) == 200 and reply["next"] == 210 and len(reply["samples"]) == 6
    assert reply["facts"]["data"]["documents"] == 12 and "pid" not in reply["facts"]
    remaining = httpx.get(f"{served.url}/v1/runs/speeches", params={"since": 207}).json()
    assert [line["step"] for line in remaining["log"]] == [199, 200] and remaining["next"] == 210
    assert {"loss", "held_out_loss", "tokens"} <= remaining["log"][-1].keys()
    assert remaining["last"] == remaining["log"][-1]


@pytest.mark.parametrize(
    "name", ["nobody", "%2e", "%2e%2e", "..%2Fspeeches", "speeches%2F..", "%00", "linked"]
)
def test_no_run_outside_the_folder_can_be_had(served: Running, root: Path, name: str) -> None:
    outside = root.parent / "outside"
    if not outside.exists():
        training_run.make_run(outside.parent, "outside", until=0)
        (root / "linked").symlink_to(outside, target_is_directory=True)
    for path in ("", "/events"):
        assert httpx.get(f"{served.url}/v1/runs/{name}{path}").status_code in (307, 404)
    assert httpx.get(f"{served.url}/v1/models/{name}@0").status_code in (307, 404)
    listed = httpx.get(f"{served.url}/v1/runs").json()["data"]
    assert "linked" not in [run["name"] for run in listed]
    (root / "linked").unlink()
    shutil.rmtree(outside)


def test_a_long_log_is_downsampled_but_never_its_held_out_losses() -> None:
    lines = [{"step": step} for step in range(10_000)]
    lines.insert(4322, {"step": 4321, "held_out_loss": 3})  # a separate line
    result = downsample(lines, 1000)
    assert len(result) <= 1002 and result[-1]["step"] == 9999
    assert {"step": 4321, "held_out_loss": 3} in result
    assert downsample([]) == [] and downsample(lines[:5]) == lines[:5]


def test_a_run_is_told_as_it_goes_and_to_its_end(served: Running, root: Path) -> None:
    run = training_run.make_run(root, "live", until=20)
    training_run.going(run)
    reply = events(served.url, "live", since=18)
    kind, data = next(reply)
    assert kind == "run" and data["state"] == "running"
    kind, data = next(reply)
    assert kind == "log" and [line["step"] for line in data["lines"]] == [19, 20]
    assert next(reply)[0] == "samples"
    training_run.log_steps(run, 21, 25)
    # Events of the run itself may come between, as its last step has changed.
    observed: list[dict[str, Any]] = []
    for kind, data in reply:
        observed += data["lines"] if kind == "log" else []
        if observed and observed[-1]["step"] == 25:
            break
    assert [line["step"] for line in observed] == [21, 22, 23, 24, 25]
    run.truncate_logs(22)  # resumed from step 22
    training_run.log_steps(run, 23, 24)
    again = next(data for kind, data in reply if kind == "log")
    assert again["from"] == 0 and [line["step"] for line in again["lines"]] == list(range(1, 25))
    run.update(state="stopped")
    remaining = dict(reply)
    assert remaining["run"]["state"] == "stopped" and "done" in remaining


def test_a_run_whose_process_is_gone_is_broken_off(served: Running, root: Path) -> None:
    run = training_run.make_run(root, "gone", until=6)
    run.update(state="running", pid=1 << 22, pid_started=1)
    reply = dict(events(served.url, "gone"))
    assert reply["run"]["state"] == "broken off" and "done" in reply
    assert not reply["run"]["can_resume"]
    answer = httpx.post(f"{served.url}/v1/runs/gone/control", json={"want": "pause"})
    assert answer.status_code == 400 and "already broken off" in answer.text


# -- checkpoints as models ---------------------------------------------------------------------


def completed(url: str, model: str, **extra: Any) -> httpx.Response:
    body = {"model": model, "prompt": "The", "max_tokens": 8, "seed": 7, **extra}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def test_a_checkpoint_writes_as_a_model_of_its_own(served: Running, root: Path) -> None:
    answer = completed(served.url, "speeches@20", temperature=0).json()
    folder = root / "speeches" / "checkpoints" / "000020"
    alone = unspool.load(folder, memory=8 << 20).generate("The", max_tokens=8, temperature=0)
    assert answer["choices"][0]["text"] == alone.text and answer["model"] == "speeches@20"
    other = completed(served.url, "speeches@60", temperature=0).json()
    assert other["choices"] != answer["choices"]
    listed = [model["id"] for model in httpx.get(f"{served.url}/v1/models").json()["data"]]
    assert listed == ["first"]  # there would be too many
    for name in ("speeches@21", "speeches@", "@20", "speeches@-1", "speeches@²"):
        assert completed(served.url, name).status_code == 404


def test_an_adapter_counts_with_the_model_it_was_tuned_from(root: Path, tmp_path: Path) -> None:
    base = root / "speeches" / "checkpoints" / "000000"
    run = Run.create(tmp_path / "tuned", "tune", steps=4)
    folder = run.folder / "checkpoints" / "000004"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"1234567")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    (folder / "training.json").write_text(json.dumps({"step": 4, "tokens": 9}))
    result = RunLibrary(tmp_path).checkpoint("tuned@4")
    assert result is not None
    assert result.size == 7 + (base / "model.safetensors").stat().st_size


def test_only_so_many_checkpoints_are_in_memory(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_EPHEMERAL", 2)
    loaded = served.state.registry.loaded
    for step in (0, 2, 6, 20):
        assert completed(served.url, f"speeches@{step}").status_code == 200
    passing = [name for name in loaded if "@" in name]
    assert passing == ["speeches@6", "speeches@20"] and "first" in loaded
    # More in parallel than fit in memory: they wait for each other, and all are answered.
    result: list[int] = []
    threads = [
        threading.Thread(
            target=lambda step=step: result.append(
                completed(served.url, f"speeches@{step}", max_tokens=60).status_code
            )
        )
        for step in (0, 2, 6, 20, 60)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert result == [200] * 5


def test_other_weights_under_the_same_name_are_loaded_anew(served: Running, root: Path) -> None:
    run = training_run.make_run(root, "again", until=2)
    first = completed(served.url, "again@2").json()["choices"]
    shutil.rmtree(run.folder / "checkpoints" / "000002")
    assert completed(served.url, "again@2").json()["choices"] == first  # still in memory
    training_run.add_checkpoint(run, 2, seed=99)
    assert completed(served.url, "again@2").json()["choices"] != first


# -- starting and stopping ---------------------------------------------------------------------


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerTrainer, "command", STAND_IN)
    monkeypatch.setattr(ServerTrainer, "check_source", lambda *_: None)


def ask(url: str, name: str, want: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/runs/{name}/control", json={"want": want})


@pytest.mark.usefixtures("stand_in")
def test_a_run_is_started_paused_and_stopped_and_there_is_only_one(
    served: Running, root: Path
) -> None:
    body = {"source": "a text.txt", "depth": 2, "minutes": 1}
    name = httpx.post(f"{served.url}/v1/runs", json=body).json()["name"]
    assert name == "a-text-d2"
    assert httpx.post(f"{served.url}/v1/runs", json=body).status_code == 409
    run = Run(root / name)
    reply = events(served.url, name)  # started before its folder exists
    assert next(reply)[1]["facts"]["settings"]["source"] == "a text.txt"
    wait_until(lambda: run.log())
    assert ask(served.url, name, "pause").status_code == 200
    wait_until(lambda: run.state == "paused")
    assert httpx.post(f"{served.url}/v1/runs", json=body).status_code == 409
    steps = len(run.log())
    ask(served.url, name, "go")
    wait_until(lambda: len(run.log()) > steps and run.state == "running")
    ask(served.url, name, "stop")
    wait_until(lambda: run.state == "stopped")
    assert dict(reply)["run"]["state"] == "stopped"
    assert ask(served.url, name, "stop").status_code == 400
    assert ask(served.url, name, "go").status_code == 400  # it has no checkpoint to resume from
    again = httpx.post(f"{served.url}/v1/runs", json=body).json()["name"]
    assert again == "a-text-d2-2"
    wait_until(lambda: (root / again / "run.json").exists())
    ask(served.url, again, "stop")
    wait_until(lambda: Run(root / again).state == "stopped")


def test_the_guide_is_true(served: Running) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "train.md").read_text(encoding="utf-8")
    section = guide.partition("## Watch it learn")[2].partition("\n## ")[0]
    visible = re.search(r"-d '({.*?})'", section)
    started = re.search(r"start one: `({.*?})`", section)
    assert visible and started
    body = json.loads(visible[1])
    body["model"] = body["model"].replace("sotu-d4", "speeches")
    assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).status_code == 200
    StartRequest(**json.loads(started[1]))
    page = httpx.get(f"{served.url}/docs", timeout=60).text
    examples = re.search(r'id="examples">(.*?)</script>', page, re.DOTALL)
    assert examples
    StartRequest(**json.loads(examples[1])["/v1/runs"])
    ControlRequest(**json.loads(examples[1])["/v1/runs/{name}/control"])
    paths = httpx.get(f"{served.url}/openapi.json", timeout=60).json()["paths"]
    reply = re.findall(r"\| `(GET|POST) (/v1/runs\S*)`", section)
    listed = {(method, path.replace("NAME", "{name}")) for method, path in reply}
    there = {
        (m.upper(), path) for path in paths if path.startswith("/v1/runs") for m in paths[path]
    }
    assert listed == there


@pytest.mark.usefixtures("stand_in")
def test_a_stopped_run_goes_on_from_its_checkpoint(served: Running, root: Path) -> None:
    run = training_run.make_run(root, "resumed", until=6, state="stopped")
    run.update(kind="tune")
    state = run.checkpoints()[-1].folder / "state"
    state.mkdir()
    (state / "state.json").write_text("{}")
    assert ask(served.url, "resumed", "go").status_code == 200
    reply = events(served.url, "resumed", since=6)
    assert any(kind == "log" and data["lines"][0]["step"] == 7 for kind, data in reply)
    assert run.facts["resumed_as"] == "tune"  # each kind has its command
    ask(served.url, "resumed", "stop")
    wait_until(lambda: run.state == "stopped")


@pytest.mark.usefixtures("stand_in")
def test_a_run_that_cannot_begin_or_fails_says_why(served: Running) -> None:
    body = {"source": "missing.txt", "name": "never"}
    assert httpx.post(f"{served.url}/v1/runs", json=body).json()["name"] == "never"
    reply = dict(events(served.url, "never"))
    assert "missing.txt: there is no such file" in reply["error"]["error"]["message"]
    later = httpx.get(f"{served.url}/v1/runs/never")
    assert later.status_code == 400 and "no such file" in later.json()["error"]["message"]
    httpx.post(f"{served.url}/v1/runs", json={"source": "nan.txt", "name": "nan"})
    reply = dict(events(served.url, "nan"))
    assert reply["run"]["state"] == "failed" and "became NaN" in reply["run"]["error"]


def test_a_run_without_data_is_refused(
    served: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise UnspoolError("the data cannot be fetched")

    commands: list[list[str]] = []
    monkeypatch.setattr(
        ServerTrainer, "_start", lambda self, name, options: commands.append(options)
    )
    monkeypatch.setattr(sources, "fetch_packaged", refuse)
    url, text = f"{served.url}/v1/runs", tmp_path / "text.txt"
    for source in ("sotu", "default", str(text), str(tmp_path)):
        answer = httpx.post(url, json={"source": source})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "data_not_found"
    assert not commands
    text.write_text("Once upon a time")
    assert httpx.post(url, json={"source": str(text)}).json()["state"] == "starting"
    assert len(commands) == 1


@pytest.mark.usefixtures("stand_in")
def test_a_run_goes_on_without_the_server_and_the_next_one_finds_it(root: Path) -> None:
    with running([entry(root)], runs=root) as first:
        httpx.post(f"{first.url}/v1/runs", json={"source": "a.txt", "name": "stays"})
        run = Run(root / "stays")
        wait_until(lambda: (run.folder / "log.jsonl").exists())
    steps = len(run.log())
    wait_until(lambda: len(run.log()) > steps)
    with running([entry(root)], runs=root) as second:
        assert httpx.post(f"{second.url}/v1/runs", json={}).status_code == 409
        assert next(events(second.url, "stays"))[1]["state"] == "running"
        ask(second.url, "stays", "stop")
        wait_until(lambda: run.state == "stopped")


@pytest.mark.usefixtures("stand_in")
def test_who_may_start_one(root: Path) -> None:
    with running([entry(root)], runs=root, host="0.0.0.0") as open_to_all:
        url = open_to_all.url.replace("0.0.0.0", "127.0.0.1")
        reply = httpx.get(f"{url}/v1/runs").json()
        assert not reply["may_start"] and "--api-key-file" in reply["why_not"]
        assert httpx.post(f"{url}/v1/runs", json={}).status_code == 403
        assert ask(url, "speeches", "stop").status_code == 403
    keys = {"api_keys": ("a-long-key",), "host": "0.0.0.0"}
    with running([entry(root)], runs=root, **keys) as keyed:
        url = keyed.url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.post(f"{url}/v1/runs", json={}).status_code == 401
        headers = {"authorization": "Bearer a-long-key"}
        for source in ("/etc", "~/notes", "../x", "*.txt", "tests"):
            answer = httpx.post(f"{url}/v1/runs", json={"source": source}, headers=headers)
            assert answer.status_code == 403, source
        body = {"source": "sotu", "name": "../x"}
        assert httpx.post(f"{url}/v1/runs", json=body, headers=headers).status_code == 400


def test_a_page_elsewhere_cannot_start_one(served: Running) -> None:
    """A form or plain text may be sent by any page, without asking first."""
    answer = httpx.post(
        f"{served.url}/v1/runs",
        content=b'{"source": "a.txt"}',
        headers={"content-type": "text/plain", "origin": "http://elsewhere.example"},
    )
    assert answer.status_code == 403
