"""`POST /v1/rerank`: order documents by their relevance to a query.

The shape is that of Jina's, Cohere's and llama.cpp's APIs; with `texts` instead of `documents`,
that of Hugging Face's text-embeddings-inference. How relevance is computed depends on the model:

- A model with an output head is asked whether the document answers the query, with the prompt of
  Qwen3-Reranker. The score is P(yes) / (P(yes) + P(no)).
- A checkpoint without an output head only embeds. The score is the cosine similarity of the
  embeddings of `/v1/embeddings`.
"""

from __future__ import annotations

import secrets
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Request
from pydantic import Field, StrictBool
from starlette.responses import Response

from unspool.decoding.search.verifiers import probability_yes, yes_no_tokens
from unspool.lens.embeddings import embedding
from unspool.server.http.errors import bad_request
from unspool.server.http.replies import new_router
from unspool.server.runtime.schema import ForeignRequest, ShortText, Strict
from unspool.server.runtime.state import Call, state_of
from unspool.session import Session

router = new_router("OpenAI")
MAX_DOCUMENTS = 1_000

# Qwen3-Reranker was trained on these words; other models understand them.
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
USER = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
PLAIN = SYSTEM + "\n\n" + USER + "\n\nAnswer:"  # for a model without a chat template

Method = Literal["yes_no", "embeddings"]


class TextDocument(Strict):
    """A document as Cohere's and Jina's clients may send it."""

    text: str


class RerankExtension(Strict):
    """Unspool-specific parameters of reranking."""

    method: Method | None = Field(
        None, description="how to score; by default yes_no if the model has an output head"
    )
    instruction: ShortText | None = Field(
        None, description="of yes_no: what makes a document relevant"
    )


Documents = Annotated[list[str | TextDocument], Field(min_length=1, max_length=MAX_DOCUMENTS)]


class RerankRequest(ForeignRequest):
    """A query, and the documents to order."""

    model: str | None = None
    query: str = Field(min_length=1)
    documents: Documents | None = None
    texts: Documents | None = Field(
        None, description="instead of documents; the answer is then a list, as TEI's is"
    )
    top_n: int | None = Field(None, ge=1, description="how many results to return, best first")
    return_documents: StrictBool | None = Field(None, description="repeat each document's text")
    return_text: StrictBool | None = Field(None, description="the same, with `texts`")
    unspool: RerankExtension | None = None


@router.post("/rerank", include_in_schema=False)
@router.post("/reranking", include_in_schema=False)
@router.post("/v1/reranking", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/v1/rerank", summary="Order documents by relevance to a query")
async def rerank(body: RerankRequest, request: Request) -> Response:
    if (body.documents is None) == (body.texts is None):
        raise bad_request("give documents (or texts): a list of 1 to 1,000 texts", "documents")
    call = await state_of(request).enter(request, body.model)
    call.apply_hints(body)
    return await call.reply(_answer(call, body))


async def _answer(call: Call, body: RerankRequest) -> Any:
    texts = [
        item if isinstance(item, str) else item.text for item in body.documents or body.texts or ()
    ]
    extension = body.unspool or RerankExtension.model_validate({})
    method = extension.method or default_method(call.served.lm)
    instruction = extension.instruction or INSTRUCTION
    if method == "yes_no":
        scores, num_tokens = await _ask(call, body.query, texts, instruction)
    else:
        scores, num_tokens = await _compare(call, body.query, texts)
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
    if body.texts is not None:
        return [
            {"index": i, "score": scores[i], **({"text": texts[i]} if body.return_text else {})}
            for i in order
        ]
    return {
        "id": f"rerank-{secrets.token_hex(12)}",
        "object": "list",
        "model": call.served.name,
        "results": [
            {
                "index": i,
                "relevance_score": scores[i],
                **({"document": {"text": texts[i]}} if body.return_documents else {}),
            }
            for i in order
        ],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        "unspool": {"method": method}
        | ({"instruction": instruction} if method == "yes_no" else {}),
    }


def default_method(lm: Session) -> Method:
    """How this model scores documents unless the request says otherwise."""
    return "embeddings" if lm.config.headless else "yes_no"


# -- A model that answers: P(yes) / (P(yes) + P(no))


async def _ask(
    call: Call, query: str, texts: list[str], instruction: str
) -> tuple[list[float], int]:
    lm = call.served.lm
    lm.config.require_causal()
    lm.config.require_head()
    yes, no = await call.compute(yes_no_tokens, lm)
    prompts = await call.compute(_prompts, call, query, texts, instruction)
    work = partial(_probability, lm, yes, no)
    # The first document runs alone; the others find instruction and query in the prefix cache.
    scores = [await call.compute(work, prompts[0]), *await call.compute_all(work, prompts[1:])]
    return scores, sum(map(len, prompts))


def _prompts(call: Call, query: str, texts: list[str], instruction: str) -> list[list[int]]:
    prompts = []
    for text in texts:
        call.check_text(instruction, query, text)
        prompts.append(rerank_prompt(call.served.lm, query, text, instruction))
        call.check_prompt(len(prompts[-1]))
    return prompts


def rerank_prompt(
    lm: Session, query: str, document: str, instruction: str = INSTRUCTION
) -> list[int]:
    """The tokens of the question whether a document answers a query, without reasoning."""
    parts = {"instruction": instruction, "query": query, "document": document}
    if not lm.is_instruct:
        return lm.tokenizer.encode_prompt(PLAIN.format(**parts))
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": USER.format(**parts)},
    ]
    return lm.chat_prompt(messages, **lm.think_options(False, {})).ids


def _probability(lm: Session, yes: frozenset[int], no: frozenset[int], prompt: list[int]) -> float:
    with lm.open_branch(prompt) as branch:
        (logits,) = lm.engine.extend_all([(branch, ())])
    return probability_yes(logits, yes, no)


# -- A model that embeds: cosine similarity


async def _compare(call: Call, query: str, texts: list[str]) -> tuple[list[float], int]:
    prompts = await call.compute(_token_lists, call, [query, *texts])
    vectors = await call.compute_all(partial(embedding, call.served.lm), prompts)
    scores = np.stack(vectors[1:]).astype(np.float64) @ vectors[0].astype(np.float64)
    return [float(score) for score in scores], sum(map(len, prompts))


def _token_lists(call: Call, texts: list[str]) -> list[list[int]]:
    call.check_text(max(texts, key=len))
    prompts = [call.served.lm.prompt_ids(text) for text in texts]
    call.check_prompt(max(map(len, prompts)))
    return prompts
