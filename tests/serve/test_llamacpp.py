"""llama.cpp's own endpoints, as its clients ask for them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

PROMPT = "The sky is"


@pytest.fixture(scope="module")
def client(server: Any) -> httpx.Client:
    with httpx.Client(base_url=server.url, timeout=60) as found:
        yield found


def test_a_text_is_continued(client, server, lm):
    body = {"prompt": PROMPT, "n_predict": 8, "seed": 7, "cache_prompt": True, "id_slot": -1}
    told = client.post("/completion", json=body)
    found, made = told.json(), lm.generate(PROMPT, max_tokens=8, seed=7)
    assert found["content"] == made.text and found["model"] == server.model
    assert (found["tokens_predicted"], found["tokens_evaluated"]) == (8, len(made.prompt))
    assert (found["stop"], found["stop_type"], found["truncated"]) == (True, "limit", False)
    assert found["prompt"] == PROMPT and found["tokens"] == []
    assert found["generation_settings"]["seed"] == 7
    assert found["timings"]["predicted_n"] == 8 and found["timings"]["predicted_per_second"] > 0
    assert told.headers["x-unspool-ignored"] == "cache_prompt, id_slot"


def test_it_streams_in_its_own_way(client, lm):
    body = {"prompt": PROMPT, "n_predict": 8, "temperature": 0, "stream": True}
    told = client.post("/completion", json=body).text
    chunks = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: ")]
    made = lm.generate(PROMPT, temperature=0, max_tokens=8)
    assert "".join(chunk["content"] for chunk in chunks) == made.text
    assert [token for chunk in chunks for token in chunk["tokens"]] == list(made.tokens)
    assert [chunk["stop"] for chunk in chunks] == [False] * 8 + [True]
    assert chunks[-1]["timings"] and "[DONE]" not in told


def test_prompts_of_words_and_ids(client, lm):
    ids = lm.prompt_ids(PROMPT)
    greedy = {"n_predict": 6, "temperature": 0}
    wanted = lm.generate(PROMPT, temperature=0, max_tokens=6).text
    for prompt in (PROMPT, ids, [*ids[:-1], " is"]):
        assert (
            client.post("/completion", json={"prompt": prompt, **greedy}).json()["content"]
            == wanted
        ), prompt
    several = client.post("/completion", json={"prompt": [PROMPT, ids, "Once"], **greedy}).json()
    assert [one["content"] for one in several[:2]] == [wanted, wanted]
    assert [one["index"] for one in several] == [0, 1, 2]


def test_probabilities(client, lm):
    body = {"prompt": PROMPT, "n_predict": 3, "temperature": 0.9, "seed": 3, "n_probs": 4}
    steps = lm.generate(PROMPT, max_tokens=3, temperature=0.9, seed=3, top=4, explain=True).steps
    found = client.post("/completion", json=body).json()["completion_probabilities"]
    assert [one["id"] for one in found] == [step.token for step in steps]
    assert [one["logprob"] for one in found] == pytest.approx([s.logprob for s in steps], abs=1e-4)
    assert all(len(one["top_logprobs"]) == 4 for one in found)
    body |= {"post_sampling_probs": True}
    found = client.post("/completion", json=body).json()["completion_probabilities"]
    assert [one["prob"] for one in found] == pytest.approx([s.probability for s in steps], abs=1e-4)


def test_grammars_and_stops(client):
    body = {"prompt": PROMPT, "n_predict": 40, "seed": 1}
    found = client.post("/completion", json=body | {"grammar": 'root ::= "blue" | "red"'}).json()
    assert found["content"] in ("blue", "red") and found["stop_type"] == "eos"
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    found = client.post("/completion", json=body | {"json_schema": schema}).json()
    assert {*json.loads(found["content"])} == {"ok"}
    found = client.post("/completion", json=body | {"temperature": 0, "stop": ["canvas"]}).json()
    assert (found["stop_type"], found["stopping_word"]) == ("word", "canvas")
    body |= {"samplers": ["top_k", "temperature"], "logit_bias": [[5, False]], "ignore_eos": True}
    found = client.post(
        "/completion", json=body | {"response_fields": ["content", "timings/predicted_n"]}
    )
    assert {*found.json()} == {"content", "timings/predicted_n"}  # llama.cpp keeps the path
    assert found.json()["timings/predicted_n"] == 40


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
