"""`/v1/diffuse`: a canvas filled pass by pass, also from where a person has changed it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from helpers import canvas_support
from helpers.running_server import Running, running, settled
from helpers.tree_client import read
from unspool.server.runtime.registry import ModelEntry

ASKED: dict[str, Any] = {"prompt": "hello", "max_tokens": 12, "seed": 3, "threshold": 0.05}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A block diffusion model, one that sees the whole canvas, and one without a mask token."""
    folder, make = tmp_path_factory.mktemp("canvas"), canvas_support.with_vocabulary

    def entry(name: str, **config: Any) -> ModelEntry:
        return ModelEntry(name, lambda: make(folder / name, **config), 1 << 20)

    entries = [
        entry("block", sight="block", block=8),
        entry("whole", sight="whole"),
        entry("causal", sight="causal", mask_id=None),
    ]
    with running(entries) as result:
        yield result


@pytest.fixture(scope="module")
def client(serving: Running) -> httpx.Client:
    return serving.http


def ask(client: httpx.Client, status: int = 200, **body: Any) -> Any:
    answer = client.post("/v1/diffuse", json={**ASKED, **body})
    assert answer.status_code == status, answer.text
    return answer.json()


def test_it_is_what_the_library_makes(client: httpx.Client, serving: Running) -> None:
    result = ask(client, top=5)
    local = serving.state.registry.loaded["block"].lm.diffuse(**ASKED)
    assert (result["tokens"], result["text"]) == (local.tokens, local.text)
    assert [item["tokens"] for item in result["data"]] == [list(p.tokens) for p in local.passes]
    assert result["passes"] == len(local.passes) and result["places"] == 12
    assert "".join(token["text"] for token in result["prompt"]) == "hello"
    for item, expected in zip(result["data"], local.passes, strict=True):
        assert [p["change"] for p in item["places"]] == [p.change for p in expected.places]
        assert [p["probability"] for p in item["places"]] == pytest.approx(
            [p.probability for p in expected.places], abs=1e-4
        )
        chances = [sum(c["probability"] for c in p["candidates"]) for p in item["places"]]
        assert all(0 < chance <= 1.0001 for chance in chances)  # the model's own, of the likeliest


def test_streamed_pass_by_pass(client: httpx.Client) -> None:
    complete = ask(client)
    with client.stream("POST", "/v1/diffuse", json={**ASKED, "stream": True}) as answer:
        events = list(read(answer))
    assert [name for name, _, _ in events] == ["start", *["pass"] * complete["passes"], "done"]
    assert events[0][1]["places"] == 12 and events[0][1]["mask_id"] == canvas_support.MASK
    assert events[-1][1]["tokens"] == complete["tokens"]
    reply = [data["tokens"] for name, data, _ in events if name == "pass"]
    assert reply == [item["tokens"] for item in complete["data"]]


@pytest.mark.parametrize("model", ["block", "whole"])
def test_it_goes_on_from_where_a_person_changed_it(client: httpx.Client, model: str) -> None:
    """A later state gives the same rest; a place that was set by hand stays, and others see it."""
    item = ask(client, model=model, order="fixed")
    third = item["data"][2]["tokens"]
    remaining = ask(client, model=model, order="fixed", given=third)
    assert remaining["tokens"] == item["tokens"] and remaining["given"][0] != remaining["given"][-1]
    assert sum(token is not None for token in remaining["data"][0]["tokens"]) == 4
    changed = [None] * 12
    changed[2] = 65
    created = ask(client, model=model, order="fixed", given=changed)
    assert created["tokens"][2] == 65 and created["tokens"] != item["tokens"]
    full = ask(client, model=model, order="fixed", given=item["tokens"])
    assert full["tokens"] == item["tokens"]


def test_given_tokens_may_be_taken_back(client: httpx.Client) -> None:
    created = ask(client, given=[65] * 3, remask=0.9, edit_passes=1)
    changes = [place["change"] for place in created["data"][0]["places"][:3]]
    assert changes == ["cleared"] * 3


@pytest.mark.parametrize(
    ("body", "message", "code"),
    [
        ({"model": "causal"}, "no mask token", None),
        ({"max_tokens": 5000}, "context holds 128", "context_length_exceeded"),
        ({"given": [0] * 13}, "given has 13 positions", None),
        ({"given": [400]}, "given holds 400", None),
        ({"given": [-1]}, "given", "invalid_value"),
        ({"order": "backwards"}, "order", "invalid_value"),
        ({"steps": 2, "k": 2}, "steps and k", None),
        ({"guidance": 2.0}, "guidance", None),
        ({"order": "entropy", "entropy_bound": -1}, "entropy_bound", None),
        ({"dry_multiplier": 1.0}, "dry_multiplier", None),
        ({"regex": "a+"}, "regex", "unknown_parameter"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "either prompt or messages", None),
    ],
)
def test_what_cannot_be_is_said(client, body, message, code):
    error = ask(client, 400, **body)["error"]
    assert message in error["message"]
    assert code is None or error["code"] == code


def test_who_leaves_gives_the_pages_back(serving: Running) -> None:
    body = {**ASKED, "model": "block", "max_tokens": 100, "order": "fixed", "stream": True}
    for events in (0, 1, 3):
        with serving.http.stream("POST", "/v1/diffuse", json=body) as answer:
            lines = answer.iter_lines()
            for _ in range(3 * events):
                next(lines)
        settled(serving)


def test_models_say_whether_they_have_a_mask(client: httpx.Client) -> None:
    ask(client)
    result = {item["id"]: item["unspool"] for item in client.get("/v1/models").json()["data"]}
    assert (result["block"]["mask_id"], result["block"]["sight"]) == (canvas_support.MASK, "block")
