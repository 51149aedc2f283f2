"""`/v1/costs`: a model of the server measured, and the reports that were kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.running_server import Running, running, settled
from helpers.tree_client import read
from unspool.costs import measuring, stored
from unspool.costs.texts import packaged_sample
from unspool.server.runtime.registry import ModelEntry


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Reports lie here, and are of texts that need not be fetched."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setattr(stored, "cache_folder", lambda: folder)
        patch.setattr(measuring, "sample_texts", lambda params: packaged_sample())
        yield folder / "reports"


@pytest.fixture(scope="module")
def serving(kept: Path, small_entry: ModelEntry) -> Iterator[Running]:
    with running([small_entry]) as result:
        yield result


@pytest.fixture
def client(serving: Running) -> Iterator[httpx.Client]:
    yield serving.http
    settled(serving)


def measured(client: httpx.Client, **body: Any) -> list[tuple[str, Any]]:
    with client.stream("POST", "/v1/costs", json=body) as answer:
        assert answer.status_code == 200
        return [(name, data) for name, data, _ in read(answer)]


def test_a_report_is_told_part_by_part_and_kept(client: httpx.Client, kept: Path):
    reply = measured(client, parts=["loops", "confidence"], seed=3)
    start = reply[0][1]
    assert reply[0][0] == "start" and start["parts"] == ["loops", "confidence"]
    shares = [data for name, data in reply if name == "progress"]
    assert {item["part"] for item in shares} == {"loops", "confidence"}
    assert shares[0]["share"] == 0 and all(0 <= item["share"] <= 1 for item in shares)
    parts = [data for name, data in reply if name == "part"]
    last, done = reply[-1]
    assert last == "done" and done["report"]["parts"] == parts
    assert done["report"]["quick"] and done["report"]["seed"] == 3
    (item,) = client.get("/v1/costs").json()["data"]
    assert item["name"] == done["name"] and item["parts"] == ["loops", "confidence"]
    assert (kept / f"{item['name']}.json").is_file()
    assert client.get(f"/v1/costs/{item['name']}").json() == done["report"]
    assert client.delete(f"/v1/costs/{item['name']}").json()["deleted"]
    assert client.get("/v1/costs").json()["data"] == []
    assert client.get(f"/v1/costs/{item['name']}").status_code == 404


def test_whoever_hangs_up_ends_the_measuring(client: httpx.Client, serving: Running, kept: Path):
    with client.stream("POST", "/v1/costs", json={"quick": False}) as answer:
        events = read(answer)
        assert next(events)[0] == "start" and next(events)[0] == "progress"
        busy = client.post("/v1/costs", json={"parts": ["loops"]})
        assert busy.status_code == 409 and "another report" in busy.json()["error"]["message"]
    settled(serving)
    assert not list(kept.glob("*")), "half a report is not kept"
    assert measured(client, parts=["confidence"])[-1][0] == "done", "another can be measured"


def test_what_is_wrong_is_said(client: httpx.Client):
    answer = client.post("/v1/costs", json={"parts": ["looops"]})
    assert answer.status_code == 400 and "did you mean loops" in answer.json()["error"]["message"]
    assert client.post("/v1/costs", json={"model": "nobody"}).status_code == 404
    for name in ("nothing", "..%2F..%2Fsecret", "a%00b"):
        assert client.get(f"/v1/costs/{name}").status_code == 404
        assert client.delete(f"/v1/costs/{name}").status_code == 404


def test_a_server_that_anyone_reaches_measures_nothing(kept: Path, small_entry: ModelEntry):
    with running([small_entry], host="0.0.0.0") as result:
        assert not result.http.get("/v1/costs").json()["may_measure"]
        answer = result.http.post("/v1/costs", json={})
        assert answer.status_code == 403 and "key" in answer.json()["error"]["message"]
        assert result.http.delete("/v1/costs/any").status_code == 403
