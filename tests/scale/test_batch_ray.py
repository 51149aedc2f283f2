"""Batches on Ray: workers and drivers that die, rows that kill workers, the same answers always."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from batch_support import (
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
from unspool.scale.batch.ray_pool import RayPool, WorkerActor, _shape
from unspool.scale.batch.rows import Row
from unspool.scale.batch.worker import Outcome

# -- which rows go out again, with a stand-in for Ray ------------------------------------------


class DiedError(Exception):
    """As Ray says of an actor that is gone."""


class FakeRay:
    """Actors that are called at once, and die when they are given a certain row."""

    __spec__ = "of a module"

    exceptions = SimpleNamespace(RayError=DiedError)

    def __init__(self, deadly: set[int]) -> None:
        self.deadly, self.hired = deadly, 0

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2.0}}]

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._actor))

    def _actor(self, *_: object) -> Any:
        self.hired += 1
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

    def remote(self, *given: Any) -> Callable[[], Any]:
        return lambda: self.call(*given)


class FakeActor:
    """Answers one row each time that it is asked."""

    def __init__(self, ray: FakeRay) -> None:
        self.ray, self.held = ray, list[Row]()

    def load(self) -> dict[str, str]:
        return {"fingerprint": "same"}

    def exchange(self, rows: list[Row]) -> list[Outcome]:
        self.held += rows
        if self.ray.deadly & {row.number for row in self.held}:
            raise DiedError
        found, self.held = self.held[:40], self.held[40:]
        return [{"row": row.number, "answer": {}} for row in found]


def all_turns(pool: Any, rows: list[Row]) -> list[Outcome]:
    waiting, outcomes = list(rows), list[Outcome]()

    def give(count: int) -> list[Row]:
        given = waiting[:count]
        del waiting[:count]
        return given

    while waiting or pool.held:
        outcomes += pool.turn(give, lambda fingerprint: None)
    return outcomes


@pytest.mark.parametrize("deadly", [set[int](), {700}, {3, 4, 900}])
def test_a_row_that_kills_workers_is_found(deadly: set[int], monkeypatch: pytest.MonkeyPatch):
    fake = FakeRay(deadly)
    monkeypatch.setitem(sys.modules, "ray", fake)
    pool = RayPool(SimpleNamespace(), workers=2)  # type: ignore[arg-type]
    rows = [Row(number, number, {"prompt": "a"}) for number in range(1, 1501)]
    outcomes = all_turns(pool, rows)
    assert sorted(outcome["row"] for outcome in outcomes) == list(range(1, 1501))
    aside = {outcome["row"]: outcome["error"] for outcome in outcomes if "error" in outcome}
    assert set(aside) == deadly
    assert all("the worker died" in error["error"] for error in aside.values())
    assert fake.hired <= 2 + 4 * len(deadly)


def test_workers_that_only_die_end_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", FakeRay(set(range(100))))
    pool = RayPool(SimpleNamespace(), workers=2)  # type: ignore[arg-type]
    rows = [Row(number, number, {"prompt": "a"}) for number in range(1, 100)]
    with pytest.raises(ValueError, match="workers died one after the other"):
        all_turns(pool, rows)


def test_how_many_workers_a_cluster_gets():
    def nodes(*resources: dict[str, float]) -> Any:
        return SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": r} for r in resources])

    assert _shape(nodes({"CPU": 8}, {"CPU": 16}), None, None) == (2, 8, 0)
    assert _shape(nodes({"CPU": 8}, {"CPU": 16}), 6, None) == (6, 4, 0)
    assert _shape(nodes({"CPU": 8}, {"CPU": 16}), None, 2) == (12, 2, 0)
    assert _shape(nodes({"CPU": 8, "GPU": 4}), None, None) == (4, 1, 1)


def test_a_cluster_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch):
    fake = FakeRay(set())

    def init(**_: object) -> None:
        raise Exception("nobody\nlistens")

    monkeypatch.setattr(fake, "is_initialized", lambda: False)
    monkeypatch.setattr(fake, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "ray", fake)
    with pytest.raises(UnspoolError, match=r"no Ray cluster at 10.0.0.1:6379 \(nobody listens\)"):
        RayPool(SimpleNamespace(), address="10.0.0.1:6379")  # type: ignore[arg-type]
    with pytest.raises(UnspoolError, match="cannot be started here"):
        RayPool(SimpleNamespace())  # type: ignore[arg-type]


def test_without_ray_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("unspool.scale.needs_ray.find_spec", lambda name: None)
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    assert batch(tmp_path, rows, tmp_path / "out.jsonl", "--ray") == 2
    assert "unspool[ray]" in capsys.readouterr().err


# -- Ray itself --------------------------------------------------------------------------------


@pytest.mark.xdist_group("ray")
def test_a_worker_and_then_the_driver_are_killed(tmp_path: Path, chatty: Path):
    """Nothing is lost, nothing is twice, nothing runs on, and the answers are the same."""
    given = [{"prompt": f"Node {n}", "max_tokens": 4 * n, "end": False} for n in range(1, 121)]
    rows = write_rows(tmp_path / "in.jsonl", [*given, {"prompt": []}])
    output, undisturbed = tmp_path / "out.jsonl", tmp_path / "undisturbed.jsonl"
    assert batch(chatty, rows, undisturbed) == 1
    driver = started(chatty, rows, output, "--address", "local", "--workers", "1")
    try:
        wait_until(lambda: done_rows(output) > 10, driver)
        (worker,) = processes_below(driver.pid, f"ray::{WorkerActor.__name__}")
        os.kill(worker, signal.SIGKILL)
        before = done_rows(output)
        wait_until(lambda: done_rows(output) > before + 5, driver)
    finally:
        below = processes_below(driver.pid)
        driver.kill()
    assert ended(driver)[0] == -signal.SIGKILL
    assert 15 < done_rows(output) < 121
    wait_until(lambda: not any(map(is_running, below)))
    assert batch(chatty, rows, output) == 1
    assert output.read_bytes() == undisturbed.read_bytes()
    assert len(read_lines(output)) == 120
    assert (tmp_path / "out.errors.jsonl").read_bytes() == (
        tmp_path / "undisturbed.errors.jsonl"
    ).read_bytes()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_node_is_lost(tmp_path: Path, chatty: Path):
    """Of two machines one goes in the midst of it; the other ends the work alone."""
    from ray.cluster_utils import Cluster

    given = [{"prompt": f"Node {n}", "max_tokens": 4 * n, "end": False} for n in range(1, 121)]
    rows = write_rows(tmp_path / "in.jsonl", given)
    output, undisturbed = tmp_path / "out.jsonl", tmp_path / "undisturbed.jsonl"
    assert batch(chatty, rows, undisturbed) == 0
    small = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=small)
    try:
        node = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        driver = started(chatty, rows, output, "--address", cluster.address)
        wait_until(lambda: done_rows(output) > 10, driver)
        cluster.remove_node(node, allow_graceful=False)
        code, told = ended(driver)
        assert code == 0, told
    finally:
        cluster.shutdown()
    assert output.read_bytes() == undisturbed.read_bytes()
