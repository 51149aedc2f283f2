"""Route groups are imported with their first request: once, and other requests do not wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import APIRouter

from helpers.running_server import in_event_loop
from unspool.features import RouteGroup
from unspool.server import app as apps
from unspool.server.app import create_app
from unspool.server.http.settings import ServerSettings
from unspool.server.runtime import threads
from unspool.server.runtime.registry import ModelEntry, ModelRegistry

PATIENCE = 60.0


class SlowImport:
    """A router whose import blocks until `is_ready` is set."""

    def __init__(self) -> None:
        self.is_begun, self.is_ready, self.imports = threading.Event(), threading.Event(), 0

    def load(self, target: str) -> APIRouter:
        assert target == "slow:router"
        self.imports += 1
        self.is_begun.set()
        assert self.is_ready.wait(PATIENCE)
        return slow_router()


GROUPS = (RouteGroup(("/slow",), ("slow:router",)),)


def slow_router() -> APIRouter:
    router = APIRouter()
    router.get("/slow/route")(lambda: {"slow": True})
    return router


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowImport]:
    slow_import = SlowImport()
    monkeypatch.setattr(apps, "ROUTE_GROUPS", GROUPS)
    monkeypatch.setattr(apps, "load", slow_import.load)
    yield slow_import
    slow_import.is_ready.set()


def new_app() -> Any:
    registry = ModelRegistry([ModelEntry("none", lambda: None, 1)], model_memory=1)  # type: ignore
    return create_app(ServerSettings(), registry, features=())[0]


def client(app: Any) -> httpx.AsyncClient:
    url = "http://localhost"
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=url)


@in_event_loop
async def test_health_does_not_wait_for_an_import(slow: SlowImport):
    async with client(new_app()) as http:
        first = [asyncio.ensure_future(http.get("/slow/route")) for _ in range(3)]
        await asyncio.to_thread(slow.is_begun.wait, PATIENCE)
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 200
        assert not any(task.done() for task in first)
        slow.is_ready.set()
        assert [(await task).json() for task in first] == [{"slow": True}] * 3
    assert slow.imports == 1


@in_event_loop
async def test_an_import_does_not_wait_for_threads_that_requests_fill(slow: SlowImport):
    busy = threading.Event()
    work = [asyncio.ensure_future(threads.in_thread(busy.wait, PATIENCE)) for _ in range(64)]
    await asyncio.sleep(0)  # so that they are there before the request
    slow.is_ready.set()
    try:
        async with client(new_app()) as http:
            assert (await http.get("/slow/route")).status_code == 200
            assert (await http.get("/health")).status_code == 200
    finally:
        busy.set()
        await asyncio.gather(*work)


@in_event_loop
async def test_the_document_and_a_first_request_at_once(slow: SlowImport):
    app = new_app()
    async with client(app) as http:
        first = asyncio.ensure_future(http.get("/slow/route"))
        await asyncio.to_thread(slow.is_begun.wait, PATIENCE)
        complete = asyncio.ensure_future(http.get("/openapi.json"))
        other = asyncio.ensure_future(asyncio.to_thread(app.app.openapi))
        assert (await http.get("/health")).status_code == 200
        slow.is_ready.set()
        assert (await first).json() == {"slow": True}
        assert "/slow/route" in (await complete).json()["paths"]
        assert "/slow/route" in (await other)["paths"]
    assert slow.imports == 1


@in_event_loop
async def test_an_import_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    attempts: list[int] = []

    def load(target: str) -> APIRouter:
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("too many open files")
        return slow_router()

    monkeypatch.setattr(apps, "ROUTE_GROUPS", GROUPS)
    monkeypatch.setattr(apps, "load", load)
    async with client(new_app()) as http:
        assert (await http.get("/slow/route")).status_code == 500
        assert (await http.get("/slow/route")).json() == {"slow": True}
