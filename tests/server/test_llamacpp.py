"""llama.cpp's own endpoints, as its clients ask for them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

PROMPT = "The sky is"


@pytest.fixture(scope="module")
def client(server: Any) -> httpx.Client:
    with httpx.Client(base_url=server.url, timeout=60) as result:
        yield result


def test_a_text_is_continued(client, server, lm):
    body = {"prompt": PROMPT, "n_predict": 8, "seed": 7, "cache_prompt": True, "id_slot": -1}
    reply = client.post("/completion", json=body)
    result, created = reply.json(), lm.generate(PROMPT, max_tokens=8, seed=7)
    assert result["content"] == created.text and result["model"] == server.model
    assert (result["tokens_predicted"], result["tokens_evaluated"]) == (8, len(created.prompt))
    assert (result["stop"], result["stop_type"], result["truncated"]) == (True, "limit", False)
    assert result["prompt"] == PROMPT and result["tokens"] == []
    assert result["generation_settings"]["seed"] == 7
    assert result["timings"]["predicted_n"] == 8 and result["timings"]["predicted_per_second"] > 0
    assert reply.headers["x-unspool-ignored"] == "cache_prompt, id_slot"


def test_it_streams_in_its_own_way(client, lm):
    body = {"prompt": PROMPT, "n_predict": 8, "temperature": 0, "stream": True}
    reply = client.post("/completion", json=body).text
    chunks = [json.loads(line[6:]) for line in reply.splitlines() if line.startswith("data: ")]
    created = lm.generate(PROMPT, temperature=0, max_tokens=8)
    assert "".join(chunk["content"] for chunk in chunks) == created.text
    assert [token for chunk in chunks for token in chunk["tokens"]] == list(created.tokens)
    assert [chunk["stop"] for chunk in chunks] == [False] * 8 + [True]
    assert chunks[-1]["timings"] and "[DONE]" not in reply


def test_prompts_of_words_and_ids(client, lm):
    ids = lm.prompt_ids(PROMPT)
    greedy = {"n_predict": 6, "temperature": 0}
    expected = lm.generate(PROMPT, temperature=0, max_tokens=6).text
    for prompt in (PROMPT, ids, [*ids[:-1], " is"]):
        assert (
            client.post("/completion", json={"prompt": prompt, **greedy}).json()["content"]
            == expected
        ), prompt
    several = client.post("/completion", json={"prompt": [PROMPT, ids, "Once"], **greedy}).json()
    assert [item["content"] for item in several[:2]] == [expected, expected]
    assert [item["index"] for item in several] == [0, 1, 2]


def test_probabilities(client, lm):
    body = {"prompt": PROMPT, "n_predict": 3, "temperature": 0.9, "seed": 3, "n_probs": 4}
    steps = lm.generate(PROMPT, max_tokens=3, temperature=0.9, seed=3, top=4, explain=True).steps
    result = client.post("/completion", json=body).json()["completion_probabilities"]
    assert [item["id"] for item in result] == [step.token for step in steps]
    assert [item["logprob"] for item in result] == pytest.approx(
        [s.logprob for s in steps], abs=1e-4
    )
    assert all(len(item["top_logprobs"]) == 4 for item in result)
    body |= {"post_sampling_probs": True}
    result = client.post("/completion", json=body).json()["completion_probabilities"]
    assert [item["prob"] for item in result] == pytest.approx(
        [s.probability for s in steps], abs=1e-4
    )


def test_grammars_and_stops(client):
    body = {"prompt": PROMPT, "n_predict": 40, "seed": 1}
    result = client.post("/completion", json=body | {"grammar": 'root ::= "blue" | "red"'}).json()
    assert result["content"] in ("blue", "red") and result["stop_type"] == "eos"
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    result = client.post("/completion", json=body | {"json_schema": schema}).json()
    assert {*json.loads(result["content"])} == {"ok"}
    result = client.post("/completion", json=body | {"temperature": 0, "stop": ["canvas"]}).json()
    assert (result["stop_type"], result["stopping_word"]) == ("word", "canvas")
    body |= {"samplers": ["top_k", "temperature"], "logit_bias": [[5, False]], "ignore_eos": True}
    result = client.post(
        "/completion", json=body | {"response_fields": ["content", "timings/predicted_n"]}
    )
    assert {*result.json()} == {"content", "timings/predicted_n"}  # llama.cpp keeps the path
    assert result.json()["timings/predicted_n"] == 40


def test_what_can_be_read(client, server):
    props = client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 8192 and props["total_slots"] == 64
    assert "<|im_start|>" in props["chat_template"] and props["eos_token"] == "<|im_end|>"
    slots = client.get("/slots").json()
    assert len(slots) == 64 and not slots[0]["is_processing"]
    for path in ("/props", "/slots/0?action=erase"):
        refused = client.post(path, json={})
        assert refused.status_code == 501 and "read-only" in refused.json()["error"]["message"]


def test_errors_have_its_shape(client):
    refused = client.post("/completion", json={"prompt": PROMPT, "temprature": 1})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == 400 and "did you mean 'temperature'" in error["message"]
    assert client.post("/completion", json={"prompt": PROMPT, "model": "x"}).status_code == 404
