"""Completions, embeddings and the endpoints about text, by the real client or plain HTTP."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from helpers import assets
from unspool.decoding.search.samples import best_of
from unspool.lens.activations import get_activations
from unspool.lens.embeddings import embedding
from unspool.server.dialects.tokens import open_vocabulary

PROMPT = "The capital of Germany is"


@pytest.fixture(scope="module")
def complete(openai_client: Any, go_on: dict[str, Any]) -> Any:
    def completed(**params: Any) -> Any:
        usual = {"model": "smollm", "prompt": PROMPT, "seed": 5, "max_tokens": 12, **go_on}
        return openai_client.completions.create(**{**usual, **params})

    return completed


def test_a_text_is_continued(openai, complete, lm, go_on):
    answer = complete()
    expected = lm.generate(PROMPT, seed=5, max_tokens=12, **go_on)
    assert answer.choices[0].text == expected.text and answer.object == "text_completion"
    ids = lm.tokenizer.encode_prompt(PROMPT)
    assert complete(prompt=ids).choices[0].text == expected.text
    chunks = list(complete(stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == expected.text
    assert chunks[-1].usage.completion_tokens == 12
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "length"
    assert complete(max_tokens=openai.omit).usage.completion_tokens == 16  # unless it is said


def test_several_prompts_and_choices(complete, lm, go_on):
    prompts = [PROMPT, "Once upon a time", "Two and two make"]
    answer = complete(prompt=prompts, n=2)
    expected = [
        lm.generate(prompt, seed=5, sample=sample, max_tokens=12, **go_on).text
        for prompt in prompts
        for sample in range(2)
    ]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [*range(6)]
    streamed = [""] * 6
    for chunk in complete(prompt=prompts, n=2, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == expected


def test_the_best_of_several(complete, lm, go_on):
    ranking = best_of(lm, PROMPT, 4, seed=5, max_tokens=12, **go_on)
    answer = complete(best_of=4, n=2)
    assert [c.text for c in answer.choices] == [g.text for g in ranking.generations[:2]]
    assert answer.usage.completion_tokens == 48


def test_the_prompt_is_scored(complete, lm, go_on):
    text = "The cat sat on the mat. ☂"
    answer = complete(prompt=text, echo=True, logprobs=2, max_tokens=0).choices[0]
    score = lm.score(text, top=2)
    assert answer.text == text and answer.logprobs.token_logprobs[0] is None
    assert answer.logprobs.token_logprobs[1:] == pytest.approx(score.logprobs[1:])
    assert answer.logprobs.tokens[-1].startswith("bytes:") or answer.logprobs.tokens[-1] == " ☂"
    assert answer.logprobs.text_offset[:3] == [0, 3, 7]
    extra = complete(prompt=text, echo=True, logprobs=2, max_tokens=3, temperature=0).choices[0]
    steps = lm.generate(text, temperature=0, max_tokens=3, **go_on).steps
    expected = [*score.logprobs[1:], *(step.logprob for step in steps)]
    assert extra.logprobs.token_logprobs[1:] == pytest.approx(expected)
    best = [max(top, key=top.get) for top in extra.logprobs.top_logprobs[-3:]]
    assert best == extra.logprobs.tokens[-3:]
    reply = list(complete(prompt=text, echo=True, logprobs=2, max_tokens=3, temperature=0,
                         stream=True))  # fmt: skip
    result = [
        p for c in reply if c.choices[0].logprobs for p in c.choices[0].logprobs.token_logprobs
    ]
    assert result == extra.logprobs.token_logprobs


def test_the_end_can_be_written_over(complete, lm):
    end = next(iter(lm.end_ids))
    bias = {str(end): 100}
    assert complete(logit_bias=bias).choices[0].finish_reason == "stop"
    on = complete(logit_bias=bias, extra_body={"unspool": {"end": False}})
    assert on.usage.completion_tokens == 12


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"max_tokens": 0}, "echo"),
        ({"best_of": 1, "n": 2}, "best_of must be at least n"),
        ({"best_of": 3, "stream": True}, "cannot be streamed"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [99999999]}, "not in the vocabulary"),
        ({"logprobs": 50}, "20"),
        ({"prompt": ["a"] * 300}, "prompt"),
    ],
)
def test_what_cannot_be_is_refused(openai, complete, params, words):
    with pytest.raises(openai.BadRequestError, match=words):
        complete(**params)


def test_embeddings_are_the_mean_of_the_final_vectors(openai, openai_client, server, lm):
    texts = ["The cat sat on the mat", "A cat sits on a mat", "Stock markets fell sharply"]
    answer = openai_client.embeddings.create(model="smollm", input=texts)  # base64 under the hood
    entry, near, far = (np.array(item.embedding) for item in answer.data)
    assert abs(np.linalg.norm(entry) - 1) < 1e-5 and len(entry) == lm.config.width
    assert entry @ near > entry @ far
    ids = lm.tokenizer.encode_prompt(texts[0])
    final = [
        lm.model.normed(get_activations(lm, ids, i).residuals[-1][None])[0] for i in range(len(ids))
    ]
    mean = np.mean(final, axis=0)
    assert np.allclose(entry, mean / np.linalg.norm(mean), atol=1e-5)
    assert answer.usage.prompt_tokens == sum(len(lm.tokenizer.encode(t)) for t in texts)
    plain = server.http.post("/v1/embeddings", json={"input": texts[0]}).json()
    assert np.allclose(plain["data"][0]["embedding"], entry, atol=1e-5)
    packed = server.http.post(
        "/v1/embeddings", json={"input": ids, "encoding_format": "base64"}
    ).json()
    assert np.allclose(
        np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4"), entry
    )
    long = "One word after another. " * 60  # embedded in pieces
    result = openai_client.embeddings.create(model="smollm", input=long).data[0].embedding
    assert np.allclose(result, embedding(lm, long), atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        openai_client.embeddings.create(model="smollm", input="x", dimensions=16)


def test_text_into_tokens_and_back(http, lm):
    text = "Grüße, 世界 🙂"
    result = http.post("/tokenize", json={"content": text, "with_pieces": True}).json()
    ids = [token["id"] for token in result["tokens"]]
    assert ids == lm.tokenizer.encode(text)
    assert bytes(b for piece in result["pieces"] for b in piece["bytes"]).decode() == text
    assert http.post("/detokenize", json={"tokens": ids}).json()["content"] == text
    # As vLLM has it, and lm-eval asks for it.
    info = http.get("/tokenizer_info").json()
    ids = http.post("/tokenize", json={"prompt": info["eos_token"]}).json()["tokens"]
    assert ids == [lm.tokenizer.eos_id] and info["chat_template"] == lm.tokenizer.chat_template
    assert http.post("/tokenize", json={"content": "a", "prompt": "b"}).status_code == 400
    spelled = {"content": "<|im_end|>"}
    text = http.post("/tokenize", json={**spelled, "parse_special": False}).json()["tokens"]
    assert len(text) > 1
    read = http.post("/tokenize", json=spelled).json()["tokens"]
    assert read == [lm.tokenizer.special_tokens["<|im_end|>"]]
    assert http.post("/detokenize", json={"tokens": [10**6]}).status_code == 400


def test_merges_and_other_vocabularies(http, lm, monkeypatch):
    result = http.post("/tokenize", json={"content": "unspooling it", "merges": True}).json()
    words = result["words"]
    assert [token for word in words for token in word["ids"]] == result["tokens"]
    first = words[0]
    assert "".join(first["start"]) == "unspooling" and len(first["start"]) == 10
    pieces = first["start"]
    for merge in first["merges"]:
        assert len(merge["pieces"]) == len(pieces) - 1
        pieces = merge["pieces"]
    assert http.post("/tokenize", json={"content": "a" * 3000, "merges": True}).status_code == 400
    for reply in http.get("/vocabularies").json()["data"]:
        body = {"content": "How do transformers work?", "vocabulary": reply["name"]}
        answer = http.post("/tokenize", json=body)
        assert answer.status_code == (200 if reply["available"] else 400)
    bad = {"content": "a", "vocabulary": "../../etc/passwd"}
    assert http.post("/tokenize", json=bad).status_code == 400


def test_other_vocabularies_where_they_are_here(http, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(assets.tiktoken_ranks()))
    open_vocabulary.cache_clear()
    body = {"content": "How do transformers work?", "vocabulary": "gpt2"}
    ids = [2437, 466, 6121, 364, 670, 30]
    assert http.post("/tokenize", json=body).json()["tokens"] == ids
    open_vocabulary.cache_clear()


def test_a_template_is_applied(http, lm):
    messages = [{"role": "user", "content": "Hi <|im_end|>"}]
    result = http.post("/apply-template", json={"messages": messages}).json()
    expected = lm.chat_prompt(messages)
    assert result["prompt"] == expected.text and result["tokens"] == expected.ids
    end = lm.tokenizer.special_tokens["<|im_end|>"]
    assert result["tokens"].count(end) == 2  # the template's own: what a user spells is text
    assert result["spans"][0]["role"] == "user" and result["generation"]["end"] == len(expected.ids)


def test_a_text_is_judged(http, lm):
    result = http.post("/score", json={"text": PROMPT, "top": 3}).json()
    expected = lm.score(PROMPT, top=3)
    assert result["total"] == pytest.approx(expected.total)
    assert result["perplexity"] == pytest.approx(expected.perplexity)
    assert len(result["positions"][1]["candidates"]) == 3
    assert http.post("/score", json={"text": "a"}).json()["perplexity"] is None
    assert http.post("/score", json={}).status_code == 400


def test_the_models(http, server):
    (model,) = http.get("/v1/models").json()["data"]
    assert model["id"] == "smollm" and model["unspool"]["loaded"]
    assert http.get("/v1/models/smollm").json() == model
    closed = http.get("/v1/models/other")
    assert closed.status_code == 404 and closed.json()["error"]["code"] == "model_not_found"


def test_health_and_metrics(http):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json()["status"] == "ready"
    http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4})
    text = http.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['unspool_completion_tokens_total{model="smollm"}']) >= 4
    assert float(values['unspool_pages{model="smollm",state="total"}']) > 0
    assert float(values['unspool_requests_total{path="/v1/completions",status="200"}']) >= 1
    assert float(values["unspool_sequences_running"]) == 0
    for name in ("time_to_first_token_seconds", "time_per_token_seconds"):
        assert float(values[f'unspool_{name}_count{{model="smollm"}}']) >= 1
