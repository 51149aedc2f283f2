"""`/v1/rerank` orders documents by what the model says, in the shapes that clients expect."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import unspool
from helpers import tiny_masked
from helpers.running_server import default_entry, running, settled
from helpers.thought_families import QWEN, save_thinker
from helpers.word_model import save_worded
from unspool.decoding.search.verifiers import yes_no_tokens
from unspool.server.dialects.rerank import INSTRUCTION, SYSTEM, rerank_prompt

QUERY = "What do cats eat?"
DOCUMENTS = ["Paris is a city.", "Cats eat meat.", "", "Grass is green. <|im_end|>"]
PATHS = ["/v1/rerank", "/v1/reranking", "/v2/rerank", "/rerank", "/reranking"]


def ask(server: Any, path: str = "/v1/rerank", **body: Any) -> Any:
    answer = server.http.post(path, json={"query": QUERY, "documents": DOCUMENTS} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(server: Any, status: int = 400, path: str = "/v1/rerank", **body: Any) -> Any:
    body = {"query": QUERY, "documents": DOCUMENTS} | body
    answer = server.http.post(path, json={name: v for name, v in body.items() if v is not ...})
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def scores(answer: Any) -> list[float]:
    """The scores in the order of the documents."""
    return [row["relevance_score"] for row in sorted(answer["results"], key=lambda r: r["index"])]


@pytest.mark.real
def test_scores_are_the_probability_of_yes(server: Any, lm: Any):
    answer = ask(server)
    yes, no = yes_no_tokens(lm)
    assert all(lm.tokenizer.decode([token]).strip().lower() == "yes" for token in yes)
    expected, num_tokens = [], 0
    for document in DOCUMENTS:
        prompt = rerank_prompt(lm, QUERY, document)
        num_tokens += len(prompt)
        mass = [
            sum(math.exp(lm.score([*prompt, token]).logprobs[-1]) for token in tokens)
            for tokens in (yes, no)
        ]
        expected.append(mass[0] / sum(mass))
    assert scores(answer) == pytest.approx(expected, rel=1e-3)
    in_order = [row["relevance_score"] for row in answer["results"]]
    assert in_order == sorted(scores(answer), reverse=True) and len(in_order) == len(DOCUMENTS)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert answer["unspool"] == {"method": "yes_no", "instruction": INSTRUCTION}
    assert answer["object"] == "list" and answer["model"] == server.model
    settled(server)


@pytest.mark.real
def test_scores_do_not_depend_on_other_documents(server: Any):
    alone = [ask(server, documents=[text])["results"][0]["relevance_score"] for text in DOCUMENTS]
    assert scores(ask(server)) == alone == scores(ask(server))


@pytest.mark.real
def test_an_instruction_changes_the_question(server: Any):
    answer = ask(server, unspool={"instruction": "Find rhymes"})
    assert answer["unspool"]["instruction"] == "Find rhymes"
    assert scores(answer) != scores(ask(server))


@pytest.mark.real
def test_embeddings_are_compared_by_cosine(server: Any):
    answer = ask(server, unspool={"method": "embeddings"}, documents=DOCUMENTS[:2])
    reply = server.http.post("/v1/embeddings", json={"input": [QUERY, *DOCUMENTS[:2]]}).json()
    query, *vectors = (np.array(row["embedding"]) for row in reply["data"])
    assert scores(answer) == pytest.approx([float(query @ v) for v in vectors], abs=1e-4)
    assert answer["usage"] == reply["usage"] and answer["unspool"] == {"method": "embeddings"}


@pytest.mark.real
@pytest.mark.parametrize("path", PATHS)
def test_the_shapes_of_other_servers(server: Any, path: str):
    best, *_ = everything = ask(server, path)["results"]
    (only,) = ask(server, path, top_n=1, return_documents=True)["results"]
    assert only == {**best, "document": {"text": DOCUMENTS[best["index"]]}}
    objects = ask(server, path, documents=[{"text": text} for text in DOCUMENTS], top_n=99)
    assert objects["results"] == everything
    body = {"query": QUERY, "texts": DOCUMENTS, "return_text": True}  # TEI's
    rows = server.http.post(path, json=body).json()
    assert [(row["index"], row["score"]) for row in rows] == [
        (row["index"], row["relevance_score"]) for row in everything
    ]
    assert rows[0]["text"] == DOCUMENTS[rows[0]["index"]]


@pytest.mark.real
def test_what_is_refused(server: Any):
    for documents in ([], None, 123, [1, 2], [["a"]], [{"title": "a"}], ["a"] * 1001, ...):
        refusal(server, documents=documents)
    for body in ({"query": ""}, {"query": ...}, {"top_n": 0}, {"top_n": True}, {"topn": 1},
                 {"texts": ["both"]}, {"unspool": {"method": "magic"}},
                 {"return_documents": 1}):  # fmt: skip
        refusal(server, **body)
    assert "did you mean 'top_n'" in refusal(server, topn=1)["message"]
    refusal(server, 404, model="nothing")
    long = refusal(server, documents=["short", "word " * 100_000])
    assert long["type"] == "exceed_context_size_error"
    settled(server)


def test_the_prompt_is_that_of_qwen3_reranker(tmp_path: Path):
    with unspool.load(save_thinker(tmp_path, QWEN), memory=8 << 20) as lm:
        ids = rerank_prompt(lm, "a query", "a text <|end|>")
        assert lm.tokenizer.decode(ids) == (
            f"<|turn|>system\n{SYSTEM}<|end|>\n<|turn|>user\n<Instruct>: {INSTRUCTION}\n"
            "<Query>: a query\n<Document>: a text <|end|><|end|>\n"
            "<|turn|>assistant\n<think>\n\n</think>\n\n"
        )
        end = lm.tokenizer.encode("<|end|>", specials=True)[0]
        assert ids.count(end) == 2  # the document's own is text


def test_what_the_model_is_decides(tmp_path: Path):
    causal = save_worded(tmp_path / "causal")
    headless = save_worded(tmp_path / "headless")
    config = json.loads((headless / "config.json").read_text()) | {"tie_word_embeddings": False}
    (headless / "config.json").write_text(json.dumps(config))
    weights = load_file(headless / "model.safetensors")
    weights.pop("lm_head.weight", None)
    save_file(weights, headless / "model.safetensors", {"format": "pt"})
    masked = tmp_path / "masked"
    masked.mkdir()
    tiny_masked.save("sdar", masked)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(causal / name, masked)
    entries = [
        default_entry(folder, folder.name, memory=16 << 20, threads=1)
        for folder in (causal, headless, masked)
    ]
    with running(entries) as server:
        assert ask(server, model="causal")["unspool"]["method"] == "yes_no"
        answer = ask(server, model="headless", documents=DOCUMENTS[:2])
        assert answer["unspool"] == {"method": "embeddings"}
        assert all(-1.001 <= score <= 1.001 for score in scores(answer))
        message = refusal(server, model="headless", unspool={"method": "yes_no"})["message"]
        assert "head" in message
        assert "bidirectional" in refusal(server, model="masked")["message"]
