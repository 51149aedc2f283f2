"""Answers that are searched for over HTTP: `unspool.think` in chats, and `/v1/think`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers import tiny
from helpers.api_requests import parse_events
from helpers.running_server import Running, default_entry, running, settled
from helpers.tree_client import read

ASKED = [{"role": "user", "content": "Plan the rows of the tree"}]
THINK: dict[str, Any] = {"policy": "best-of", "n": 4, "budget": 600, "judge": "logprob"}
CHAT: dict[str, Any] = {"messages": ASKED, "max_tokens": 12, "seed": 3}


@pytest.fixture(scope="module")
def reward(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    created = tmp_path_factory.mktemp("reward")
    shape = {**tiny._SHAPE, "vocab_size": 512, "max_position_embeddings": 512, "eos_token_id": 0}
    config = transformers.LlamaConfig(**shape, num_labels=1)
    tiny.filled(transformers.LlamaForSequenceClassification(config)).save_pretrained(created)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(small_model / name, created / name)
    return created


@pytest.fixture(scope="module")
def serving(small_model: Path, reward: Path) -> Iterator[Running]:
    usual = {"memory": 16 << 20, "threads": 1}
    entries = [
        default_entry(small_model, "chatty", **usual),
        default_entry(reward, "rewarder", **usual),
    ]
    with running(entries, max_think=1000, max_choices=8) as result:
        yield result


@pytest.fixture
def local_lm(serving: Running) -> Any:
    return serving.state.registry.loaded["chatty"].lm


@pytest.fixture
def client(serving: Running) -> Iterator[httpx.Client]:
    yield serving.http
    settled(serving)  # all that a test used is released


def chat(client: httpx.Client, think: dict[str, Any], status: int = 200, **body: Any) -> Any:
    extension = {"think": think, **body.pop("unspool", {})}
    answer = client.post("/v1/chat/completions", json={**CHAT, "unspool": extension, **body})
    assert answer.status_code == status, answer.text
    return answer.json()


def chunks(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    answer = client.post("/v1/chat/completions", json={**CHAT, "stream": True, **body})
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n"), answer.text
    return parse_events(answer.text)


def test_the_winner_is_the_answer(client: httpx.Client, local_lm: Any):
    result = chat(client, THINK)
    ids = local_lm.chat_prompt(ASKED).ids
    expected = local_lm.think(ids, n=4, budget=600, max_tokens=12, seed=3)
    (choice,) = result["choices"]
    assert choice["message"]["content"] == expected.text
    assert choice["finish_reason"] == (
        "stop" if expected.best.finish_reason == "stop" else "length"
    )
    reply = result["unspool"]["think"]
    assert reply["score"] == pytest.approx(expected.score, abs=1e-4)
    assert reply["policy"] == "best-of" and reply["spent"]["total"] <= 600 and "events" not in reply
    usage = result["usage"]
    assert usage["completion_tokens"] == expected.spent.written
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert reasoning == expected.spent.written - len(expected.best.tokens)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_streamed_with_and_without_its_search(client: httpx.Client):
    complete = chat(client, THINK, unspool={"trace": True})
    events = complete["unspool"]["think"]["events"]
    plain = chunks(client, unspool={"think": THINK}, stream_options={"include_usage": True})
    traced = chunks(client, unspool={"think": THINK, "trace": True})
    for result in (plain, traced):
        message = [c["choices"][0]["delta"].get("content", "") for c in result if c["choices"]]
        assert "".join(message) == complete["choices"][0]["message"]["content"]
        reasons = [c["choices"][0]["finish_reason"] for c in result if c["choices"]]
        assert [reason for reason in reasons if reason] == [complete["choices"][0]["finish_reason"]]
        score = complete["unspool"]["think"]["score"]
        assert result[-1]["unspool"]["think"]["score"] == pytest.approx(score, abs=1e-4)
    reply = [c["unspool"]["think"] for c in traced[:-1] if "unspool" in c]
    assert [item["event"] for item in reply] == [item["event"] for item in events]
    assert [e["event"] for e in events].count("grown") == 4 and reply[-1]["event"] == "won"
    assert not any("unspool" in c for c in plain[:-1])
    assert plain[-1]["usage"]["total_tokens"] == complete["usage"]["total_tokens"]


@pytest.mark.parametrize(
    "judge", ["regex:[aeiou]", "ask", "vote", "vote:(\\w+)", "vote+ask", "reward:rewarder",
              "process:rewarder", "vote+reward:rewarder", "certainty"]
)  # fmt: skip
def test_judges_by_name(client: httpx.Client, judge: str):
    result = chat(client, {**THINK, "judge": judge, "n": 2})
    reply = result["unspool"]["think"]
    assert reply["score"] is not None and reply["spent"]["total"] <= 600


@pytest.mark.parametrize(
    ("think", "message"),
    [
        ({"judge": "python:/etc/passwd"}, "are not available over HTTP"),
        ({"judge": "tests:/tmp/x.py"}, "are not available over HTTP"),
        ({"judge": "vote+python:/tmp/x.py:f"}, "are not available over HTTP"),
        ({"judge": "magic"}, "no judge 'magic'"),
        ({"judge": "regex:("}, "not a regular expression"),
        ({"judge": "ask:/etc"}, "no such model: '/etc'"),
        ({"judge": "reward:chatty"}, "no score head"),
        ({"judge": "ask:rewarder"}, "no output head"),
        ({"policy": "magic"}, "no policy 'magic'"),
        ({"budget": 5000}, "at most 1,000"),
        ({"budget": 0}, "budget"),
        ({"budget": 10}, "budget"),
        ({"n": 9}, "9 texts in parallel"),
        ({"n": "many"}, "got 'many'"),
        ({"depth_of_field": 2}, "no option 'depth_of_field'"),
    ],
)
def test_what_is_refused(client: httpx.Client, think: dict[str, Any], message: str):
    status = 404 if "no such model" in message else 400
    assert message in chat(client, {**THINK, **think}, status)["error"]["message"]


def test_one_answer_and_only_in_chats(client: httpx.Client):
    assert "one answer" in chat(client, THINK, 400, n=2)["error"]["message"]
    guarded = chat(client, THINK, 400, unspool={"guard": "loop"})
    assert "guard" in guarded["error"]["message"]
    for path, body in (
        ("/v1/completions", {"prompt": "The tree"}),
        ("/v1/responses", {"input": "The tree"}),
        ("/v1/messages", {"messages": ASKED, "max_tokens": 4}),
    ):
        answer = client.post(path, json={**body, "unspool": {"think": THINK}})
        assert answer.status_code == 400 and "/v1/chat/completions" in answer.text


def test_a_judge_that_fails_on_all_is_told(client: httpx.Client):
    result = chat(client, {**THINK, "judge": "vote:never there"}, 400)
    assert "matches never there" in result["error"]["message"]
    traced = client.post(
        "/v1/think",
        json={"prompt": "The tree", "max_tokens": 8, "stream": True,
              "think": {**THINK, "judge": "vote:never there"}},
    )  # fmt: skip
    assert [name for name, *_ in read(traced)][-1] == "error"


def test_events_of_a_search(client: httpx.Client, local_lm: Any):
    body = {"messages": ASKED, "max_tokens": 12, "seed": 3, "think": {**THINK, "judge": "vote"}}
    complete = client.post("/v1/think", json=body).json()
    with client.stream("POST", "/v1/think", json={**body, "stream": True}) as answer:
        events = [(name, data) for name, data, _ in read(answer)]
    names = [name for name, _ in events]
    assert names[0] == "start" and names[-1] == "done" and names[-2] == "won"
    assert [data["event"] for _, data in events[1:-1]] == [e["event"] for e in complete["data"]]
    start, done = events[0][1], events[-1][1]
    assert start["budget"] == 600 and start["n"] == 4 and start["seed"] == 3
    assert [token["id"] for token in start["prompt"]] == local_lm.chat_prompt(ASKED).ids
    assert done["text"] == complete["text"] and done["spent"]["total"] <= 600
    grown = [data for name, data in events if name == "grown"]
    won = events[-2][1]["node"]
    assert next(data for data in grown if data["node"] == won)["text"] == done["text"]


def test_a_prompt_or_messages(client: httpx.Client):
    for body in ({}, {"prompt": "a", "messages": ASKED}):
        assert client.post("/v1/think", json=body).status_code == 400
    result = client.post("/v1/think", json={"prompt": "The tree", "max_tokens": 4}).json()
    assert result["policy"] == "best-of" and result["budget"] == 1000
