"""Tokenizing and scoring: `/tokenize`, `/detokenize`, `/apply-template`, `/score`."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Literal, get_args

from fastapi import Request
from pydantic import Field, StrictInt
from starlette.responses import Response

from unspool.errors import UnspoolError
from unspool.server.dialects.chat_prompt import (
    FunctionTool,
    Message,
    ToolUse,
    chat_prompt,
    template_message,
    template_options,
    tools_of,
)
from unspool.server.http.errors import bad_request
from unspool.server.http.replies import new_router
from unspool.server.runtime.schema import Strict, Tokens
from unspool.server.runtime.state import Call, state_of
from unspool.text.tokenizer.bpe import merge_steps
from unspool.text.tokenizer.pieces import readable_pieces
from unspool.text.tokenizer.tokenizer import Tokenizer

router = new_router("Text and tokens")
MAX_TOP = 100
MAX_MERGE_LENGTH = 2_000  # characters
VocabularyName = Literal["gpt2", "cl100k", "o200k"]
NAMES: tuple[VocabularyName, ...] = get_args(VocabularyName)


TokenId = Annotated[StrictInt, Field(ge=0, lt=1 << 31)]


class TokenizeRequest(Strict):
    """Text to tokenize: `content` as in llama.cpp, or `prompt` as in vLLM."""

    model: str | None = None
    content: str | list[TokenId | str] | None = Field(
        None, description="a text, or a list of texts and token ids"
    )
    prompt: str | None = None
    add_special_tokens: bool = Field(True, description="of `prompt`: add the BOS token")
    add_special: bool = Field(False, description="of `content`: add the BOS token")
    parse_special: bool = Field(
        True, description="parse control tokens in the text; false: they are text"
    )
    with_pieces: bool = Field(
        False,
        description="tokens as {id, piece}, where a piece that is not UTF-8 is a list of bytes; "
        "and pieces, with each token's bytes and text",
    )
    merges: bool = Field(False, description="report the merges of each token, one by one")
    vocabulary: VocabularyName | None = Field(
        None, description="one of OpenAI's instead of the model's, if it is on this machine"
    )


class DetokenizeRequest(Strict):
    """Tokens to decode."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=1_000_000)]


class TemplateRequest(Strict):
    """A conversation to render."""

    model: str | None = None
    messages: list[Message] = Field(min_length=1)
    tools: list[FunctionTool] | None = Field(None, max_length=128)
    add_generation_prompt: bool | None = Field(
        None, description="whether to open the assistant's turn at the end (true)"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="for the model's chat template, such as enable_thinking"
    )


class ScoreRequest(Strict):
    """A text to score, token by token."""

    model: str | None = None
    text: str | None = None
    tokens: Tokens | None = None
    top: int = Field(0, ge=0, le=MAX_TOP, description="candidates reported at each position")


@router.post("/tokenize", summary="Tokenize a text")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    if (body.content is None) == (body.prompt is None):
        raise bad_request("give either content or prompt", "content")
    call = await state_of(request).enter(request, body.model, places=0)
    return await call.reply(call.compute(_tokenize, call, body))


def _tokenize(call: Call, body: TokenizeRequest) -> dict[str, Any]:
    tokenizer = call.served.lm.tokenizer
    if body.vocabulary is not None:
        tokenizer = open_vocabulary(body.vocabulary)
    content, add_start = body.content, body.add_special
    if content is None:
        content, add_start = body.prompt or "", body.add_special_tokens
    parts = content if isinstance(content, list) else [content]
    ids: list[int] = []
    for number, part in enumerate(parts):
        if isinstance(part, int):
            check_token(tokenizer, part, "content")
            ids.append(part)
        else:
            start = add_start and number == 0
            ids += tokenizer.encode(part, specials=body.parse_special, bos=start)
    reply: dict[str, Any] = {"tokens": ids, "count": len(ids)}
    reply["max_model_len"] = call.served.lm.context
    if body.with_pieces:
        pieces = list(map(tokenizer.token_bytes, ids))
        reply["tokens"] = [
            {"id": token, "piece": _text_or_bytes(piece)}
            for token, piece in zip(ids, pieces, strict=True)
        ]
        reply["pieces"] = [
            {"id": token, "text": text, "bytes": list(piece)}
            for token, piece, text in zip(ids, pieces, readable_pieces(pieces), strict=True)
        ]
    if body.merges:
        if not isinstance(content, str):
            raise bad_request("merges needs content to be a single text", "merges")
        reply["words"] = _merges_json(tokenizer, content)
    return reply


def _text_or_bytes(piece: bytes) -> str | list[int]:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)


def _merges_json(tokenizer: Tokenizer, text: str) -> list[dict[str, Any]]:
    """Each word from its smallest pieces to its tokens. Slow, so only for short texts."""
    if len(text) > MAX_MERGE_LENGTH:
        message = f"merges needs a text of at most {MAX_MERGE_LENGTH:,} characters"
        raise bad_request(message, "merges")
    return [
        {
            "start": list(map(_piece_text, word.start)),
            "merges": [
                {"rank": m.rank, "position": m.position, "pieces": list(map(_piece_text, m.pieces))}
                for m in word.merges
            ],
            "ids": list(word.ids),
        }
        for word in merge_steps(tokenizer, text)
    ]


def _piece_text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


@router.get("/vocabularies", summary="Further vocabularies of /tokenize")
async def vocabularies(request: Request) -> Response:
    call = await state_of(request).enter(request, None, places=0)
    return await call.reply(call.compute(lambda: {"data": [available(name) for name in NAMES]}))


@router.post("/detokenize", summary="Decode tokens")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    call = await state_of(request).enter(request, body.model, places=0)
    return await call.reply(call.compute(_detokenize, call, body.tokens))


def _detokenize(call: Call, tokens: list[int]) -> dict[str, Any]:
    tokenizer = call.served.lm.tokenizer
    for token in tokens:
        check_token(tokenizer, token, "tokens")
    text = tokenizer.decode(tokens)
    return {"content": text, "prompt": text}


def check_token(tokenizer: Tokenizer, token: int, field: str) -> None:
    if token >= len(tokenizer):
        message = f"token ids must be below {len(tokenizer)}, got {token}"
        raise bad_request(message, field)


@router.get("/tokenizer_info", summary="Special tokens and the chat template")
async def tokenizer_info(request: Request, model: str | None = None) -> Response:
    call = await state_of(request).enter(request, model, places=0)
    return await call.reply(call.compute(_tokenizer_json, call))


def _tokenizer_json(call: Call) -> dict[str, Any]:
    """vLLM's fields, which lm-eval reads."""
    tokenizer = call.served.lm.tokenizer

    def text(token: int | None) -> str | None:
        return None if token is None else tokenizer.token_text(token)

    return {
        "eos_token": text(tokenizer.eos_id),
        "bos_token": text(tokenizer.bos_id),
        "pad_token": text(tokenizer.pad_id),
        "unk_token": text(tokenizer.unk_id),
        "chat_template": tokenizer.chat_template,
        "vocab_size": len(tokenizer),
    }


@router.post("/apply-template", summary="Render a conversation with the chat template")
async def apply_template(body: TemplateRequest, request: Request) -> Response:
    call = await state_of(request).enter(request, body.model, places=0)
    return await call.reply(call.compute(_apply_template, call, body))


def _apply_template(call: Call, body: TemplateRequest) -> dict[str, Any]:
    messages = [template_message(message) for message in body.messages]
    call.check_text(*(str(message.get("content", "")) for message in messages))
    template = template_options(body)
    prompt = chat_prompt(call.served, messages, ToolUse(tools_of(body.tools)), {}, template)
    return {
        "prompt": prompt.text,
        "tokens": prompt.ids,
        "spans": [
            {"role": span.role, "start": span.start, "end": span.end} for span in prompt.spans
        ],
        "generation": None
        if prompt.generation is None
        else {"start": prompt.generation.start, "end": prompt.generation.end},
    }


@router.post("/score", summary="Log-probabilities of a text")
async def score(body: ScoreRequest, request: Request) -> Response:
    if (body.text is None) == (body.tokens is None):
        raise bad_request("give either text or tokens", "text")
    call = await state_of(request).enter(request, body.model)
    return await call.reply(call.compute(_score, call, body))


def _score(call: Call, body: ScoreRequest) -> dict[str, Any]:
    if body.text is not None:
        call.check_text(body.text)
    scored = call.served.lm.score(
        body.text if body.text is not None else body.tokens or [], top=body.top
    )
    scores = scored.to_dict()
    if len(scored.logprobs) < 2:
        scores["perplexity"] = None  # undefined for a single token
    return {**scores, "model": call.served.name, "system_fingerprint": call.served.fingerprint}


@lru_cache(maxsize=len(NAMES))
def open_vocabulary(name: VocabularyName) -> Tokenizer:
    """One of OpenAI's vocabularies, for comparison; takes about a second the first time."""
    return Tokenizer.from_tiktoken(name)


def available(name: VocabularyName) -> dict[str, Any]:
    """Whether the vocabulary is on this machine, and if not, how to get it."""
    try:
        return {"name": name, "available": True, "size": len(open_vocabulary(name))}
    except UnspoolError as error:
        return {"name": name, "available": False, "why": str(error)}
