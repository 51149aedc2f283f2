"""Batches on Ray: workers and drivers that die, rows that kill workers, always the same answers."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.batch_support import (
    batch,
    done_rows,
    ended,
    processes_below,
    read_lines,
    started,
    wait_until,
    write_rows,
)
from unspool.errors import UnspoolError
from unspool.scale.batch.job import RayPool, WorkerActor, _cluster_layout
from unspool.scale.batch.rows import BatchRow
from unspool.scale.batch.worker import Outcome

# -- retries, with a fake Ray ------------------------------------------------------------------


class DiedError(Exception):
    """Ray's exception for a dead actor."""


class FakeRay:
    """Actors that are called synchronously, and die when they get certain rows."""

    __spec__ = "of a module"

    exceptions = SimpleNamespace(RayError=DiedError)

    def __init__(self, deadly: set[int]) -> None:
        self.deadly, self.num_actors = deadly, 0

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2.0}}]

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._actor))

    def _actor(self, *_: object) -> Any:
        self.num_actors += 1
        actor = FakeActor(self)
        return SimpleNamespace(load=_Method(actor.load), exchange=_Method(actor.exchange))

    def wait(self, refs: list[Any], **_: object) -> tuple[list[Any], list[Any]]:
        return refs, []

    def get(self, ref: Callable[[], Any]) -> Any:
        return ref()

    def kill(self, actor: object) -> None:
        pass


class _Method:
    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def remote(self, *arguments: Any) -> Callable[[], Any]:
        return lambda: self.call(*arguments)


class FakeActor:
    """Answers up to 40 rows per call."""

    def __init__(self, ray: FakeRay) -> None:
        self.ray, self.rows = ray, list[BatchRow]()

    def load(self) -> dict[str, str]:
        return {"fingerprint": "same"}

    def exchange(self, rows: list[BatchRow]) -> list[Outcome]:
        self.rows += rows
        if self.ray.deadly & {row.number for row in self.rows}:
            raise DiedError
        finished, self.rows = self.rows[:40], self.rows[40:]
        return [{"row": row.number, "answer": {}} for row in finished]


def all_turns(pool: Any, rows: list[BatchRow]) -> list[Outcome]:
    waiting, outcomes = list(rows), list[Outcome]()

    def take_rows(count: int) -> list[BatchRow]:
        block = waiting[:count]
        del waiting[:count]
        return block

    while waiting or pool.num_running:
        outcomes += pool.poll(take_rows, lambda fingerprint: None)
    return outcomes


@pytest.mark.parametrize("deadly", [set[int](), {700}, {3, 4, 900}])
def test_a_row_that_kills_workers_is_found(deadly: set[int], monkeypatch: pytest.MonkeyPatch):
    fake = FakeRay(deadly)
    monkeypatch.setitem(sys.modules, "ray", fake)
    pool = RayPool(SimpleNamespace(), workers=2)  # type: ignore[arg-type]
    rows = [BatchRow(number, number, {"prompt": "a"}) for number in range(1, 1501)]
    outcomes = all_turns(pool, rows)
    assert sorted(outcome["row"] for outcome in outcomes) == list(range(1, 1501))
    failed = {outcome["row"]: outcome["error"] for outcome in outcomes if "error" in outcome}
    assert set(failed) == deadly
    assert all("the worker died" in error["error"] for error in failed.values())
    assert fake.num_actors <= 2 + 4 * len(deadly)


def test_workers_that_only_die_end_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", FakeRay(set(range(100))))
    pool = RayPool(SimpleNamespace(), workers=2)  # type: ignore[arg-type]
    rows = [BatchRow(number, number, {"prompt": "a"}) for number in range(1, 100)]
    with pytest.raises(ValueError, match="workers died in a row"):
        all_turns(pool, rows)


def test_how_many_workers_a_cluster_gets():
    def nodes(*resources: dict[str, float]) -> Any:
        return SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": r} for r in resources])

    assert _cluster_layout(nodes({"CPU": 8}, {"CPU": 16}), None, None) == (2, 8, 0)
    assert _cluster_layout(nodes({"CPU": 8}, {"CPU": 16}), 6, None) == (6, 4, 0)
    assert _cluster_layout(nodes({"CPU": 8}, {"CPU": 16}), None, 2) == (12, 2, 0)
    assert _cluster_layout(nodes({"CPU": 8, "GPU": 4}), None, None) == (4, 1, 1)


def test_a_cluster_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch):
    fake = FakeRay(set())

    def init(**_: object) -> None:
        raise Exception("connection\nrefused")

    monkeypatch.setattr(fake, "is_initialized", lambda: False)
    monkeypatch.setattr(fake, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "ray", fake)
    with pytest.raises(UnspoolError, match=r"no Ray cluster at 10\.0\.0\.1:6379 \(conn"):
        RayPool(SimpleNamespace(), address="10.0.0.1:6379")  # type: ignore[arg-type]
    with pytest.raises(UnspoolError, match="cannot be started here"):
        RayPool(SimpleNamespace())  # type: ignore[arg-type]


def test_without_ray_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("unspool.scale.find_spec", lambda name: None)
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    assert batch(tmp_path, rows, tmp_path / "out.jsonl", "--ray") == 2
    assert "unspool[ray]" in capsys.readouterr().err


# -- Ray itself --------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_a_worker_and_then_the_driver_are_killed(tmp_path: Path, chatty: Path, ray_here: str):
    """No row is lost or duplicated, no worker remains, and the answers are the same."""
    inputs = [{"prompt": f"Node {n}", "max_tokens": 4 * n, "end": False} for n in range(1, 121)]
    rows = write_rows(tmp_path / "in.jsonl", [*inputs, {"prompt": []}])
    output, undisturbed = tmp_path / "out.jsonl", tmp_path / "undisturbed.jsonl"
    assert batch(chatty, rows, undisturbed) == 1
    driver = started(chatty, rows, output, "--address", ray_here, "--workers", "1")
    title = f"ray::{WorkerActor.__name__}"
    try:
        wait_until(lambda: done_rows(output) > 10, driver)
        (worker,) = processes_below(os.getpid(), title)
        os.kill(worker, signal.SIGKILL)
        before = done_rows(output)
        wait_until(lambda: done_rows(output) > before + 5, driver)
    finally:
        driver.kill()
    assert ended(driver)[0] == -signal.SIGKILL
    assert 15 < done_rows(output) < 121
    wait_until(lambda: not processes_below(os.getpid(), title))
    assert batch(chatty, rows, output) == 1
    assert output.read_bytes() == undisturbed.read_bytes()
    assert len(read_lines(output)) == 120
    assert (tmp_path / "out.errors.jsonl").read_bytes() == (
        tmp_path / "undisturbed.errors.jsonl"
    ).read_bytes()


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_node_is_lost(tmp_path: Path, chatty: Path):
    """One of two nodes is lost during the job; the other one completes it."""
    from ray.cluster_utils import Cluster

    inputs = [{"prompt": f"Node {n}", "max_tokens": 4 * n, "end": False} for n in range(1, 121)]
    rows = write_rows(tmp_path / "in.jsonl", inputs)
    output, undisturbed = tmp_path / "out.jsonl", tmp_path / "undisturbed.jsonl"
    assert batch(chatty, rows, undisturbed) == 0
    small = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=small)
    try:
        node = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        driver = started(chatty, rows, output, "--address", cluster.address)
        wait_until(lambda: done_rows(output) > 10, driver)
        cluster.remove_node(node, allow_graceful=False)
        code, stderr = ended(driver)
        assert code == 0, stderr
    finally:
        cluster.shutdown()
    assert output.read_bytes() == undisturbed.read_bytes()
