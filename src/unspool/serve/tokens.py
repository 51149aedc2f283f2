"""Text and tokens: `/tokenize`, `/detokenize`, `/apply-template`, `/score`."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Literal, get_args

from fastapi import Request
from pydantic import Field, StrictInt
from starlette.responses import Response

from unspool.errors import UnspoolError
from unspool.serve.core.schema import Strict, Tokens
from unspool.serve.core.state import Call, state_of
from unspool.serve.http.errors import bad_request
from unspool.serve.http.routes import new_router
from unspool.serve.openai.chat_prompt import (
    ToolUse,
    chat_prompt,
    template_message,
    template_options,
    tools_of,
)
from unspool.serve.openai.chat_schema import FunctionTool, Message
from unspool.text.tokenizer.characters import readable_pieces
from unspool.text.tokenizer.merges import merge_steps
from unspool.text.tokenizer.tokenizer import Tokenizer

router = new_router("Text and tokens")
MAX_TOP = 100
LONGEST_MERGED = 2_000
VocabularyName = Literal["gpt2", "cl100k", "o200k"]
NAMES: tuple[VocabularyName, ...] = get_args(VocabularyName)


TokenId = Annotated[StrictInt, Field(ge=0, lt=1 << 31)]


class TokenizeRequest(Strict):
    """Text into tokens: `content` as llama.cpp reads it, or `prompt` as vLLM does."""

    model: str | None = None
    content: str | list[TokenId | str] | None = Field(
        None, description="a text, or texts and token ids in a row"
    )
    prompt: str | None = None
    add_special_tokens: bool = Field(True, description="of `prompt`: begin with a start token")
    add_special: bool = Field(False, description="begin as a prompt does, with a start token")
    parse_special: bool = Field(
        True, description="control tokens that the text spells are control; false: text"
    )
    with_pieces: bool = Field(
        False,
        description="tokens as {id, piece}, where a piece that is not UTF-8 is a list of bytes; "
        "and pieces, with each token's bytes and text",
    )
    merges: bool = Field(False, description="tell how pieces join into tokens, one by one")
    vocabulary: VocabularyName | None = Field(
        None, description="one of OpenAI's instead of the model's, where its ranks are here"
    )


class DetokenizeRequest(Strict):
    """Tokens into text."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=1_000_000)]


class TemplateRequest(Strict):
    """A conversation into the text that the model reads."""

    model: str | None = None
    messages: list[Message] = Field(min_length=1)
    tools: list[FunctionTool] | None = Field(None, max_length=128)
    add_generation_prompt: bool | None = Field(
        None, description="whether the answer is opened at the end (true)"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="for the model's chat template, as enable_thinking"
    )


class ScoreRequest(Strict):
    """A text to be judged, token by token."""

    model: str | None = None
    text: str | None = None
    tokens: Tokens | None = None
    top: int = Field(0, ge=0, le=MAX_TOP, description="candidates told at each place")


@router.post("/tokenize", summary="Text into tokens")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    if (body.content is None) == (body.prompt is None):
        raise bad_request("give either content or prompt", "content")
    call = await state_of(request).enter(request, body.model, places=0)
    return await call.reply(call.thread(_tokenized, call, body))


def _tokenized(call: Call, body: TokenizeRequest) -> dict[str, Any]:
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
    found: dict[str, Any] = {"tokens": ids, "count": len(ids)}
    found["max_model_len"] = call.served.lm.context
    if body.with_pieces:
        pieces = list(map(tokenizer.token_bytes, ids))
        found["tokens"] = [
            {"id": token, "piece": _text_or_bytes(piece)}
            for token, piece in zip(ids, pieces, strict=True)
        ]
        found["pieces"] = [
            {"id": token, "text": shown, "bytes": list(piece)}
            for token, piece, shown in zip(ids, pieces, readable_pieces(pieces), strict=True)
        ]
    if body.merges:
        if not isinstance(content, str):
            raise bad_request("merges are told of a single text; content must be one", "merges")
        found["words"] = _merged(tokenizer, content)
    return found


def _text_or_bytes(piece: bytes) -> str | list[int]:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)


def _merged(tokenizer: Tokenizer, text: str) -> list[dict[str, Any]]:
    """Each word from its smallest pieces to its tokens. Plainly done, so only for short texts."""
    if len(text) > LONGEST_MERGED:
        raise bad_request(f"merges are told of at most {LONGEST_MERGED:,} characters", "merges")
    return [
        {
            "start": list(map(_spelled, word.start)),
            "merges": [
                {"rank": m.rank, "position": m.position, "pieces": list(map(_spelled, m.pieces))}
                for m in word.merges
            ],
            "ids": list(word.ids),
        }
        for word in merge_steps(tokenizer, text)
    ]


def _spelled(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


@router.get("/vocabularies", summary="The vocabularies that /tokenize knows beside the model's")
async def vocabularies(request: Request) -> Response:
    call = await state_of(request).enter(request, None, places=0)
    return await call.reply(call.thread(lambda: {"data": [available(name) for name in NAMES]}))


@router.post("/detokenize", summary="Tokens into text")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    call = await state_of(request).enter(request, body.model, places=0)
    return await call.reply(call.thread(_detokenized, call, body.tokens))


def _detokenized(call: Call, tokens: list[int]) -> dict[str, Any]:
    tokenizer = call.served.lm.tokenizer
    for token in tokens:
        check_token(tokenizer, token, "tokens")
    text = tokenizer.decode(tokens)
    return {"content": text, "prompt": text}


def check_token(tokenizer: Tokenizer, token: int, field: str) -> None:
    if token >= len(tokenizer):
        message = f"token {token} is not in the vocabulary, which ends at {len(tokenizer) - 1}"
        raise bad_request(message, field)


@router.get("/tokenizer_info", summary="The vocabulary's own tokens, and the chat template")
async def tokenizer_info(request: Request, model: str | None = None) -> Response:
    call = await state_of(request).enter(request, model, places=0)
    return await call.reply(call.thread(_tokenizer_json, call))


def _tokenizer_json(call: Call) -> dict[str, Any]:
    """As vLLM tells it, which lm-eval asks for."""
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


@router.post("/apply-template", summary="A conversation as the model reads it")
async def apply_template(body: TemplateRequest, request: Request) -> Response:
    call = await state_of(request).enter(request, body.model, places=0)
    return await call.reply(call.thread(_applied, call, body))


def _applied(call: Call, body: TemplateRequest) -> dict[str, Any]:
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


@router.post("/score", summary="How well the model sees a text coming")
async def score(body: ScoreRequest, request: Request) -> Response:
    if (body.text is None) == (body.tokens is None):
        raise bad_request("give either text or tokens", "text")
    call = await state_of(request).enter(request, body.model)
    return await call.reply(call.thread(_scored, call, body))


def _scored(call: Call, body: ScoreRequest) -> dict[str, Any]:
    if body.text is not None:
        call.check_text(body.text)
    found = call.served.lm.score(
        body.text if body.text is not None else body.tokens or [], top=body.top
    )
    scores = found.to_dict()
    if len(found.logprobs) < 2:
        scores["perplexity"] = None  # of a single token nothing can be said
    return {**scores, "model": call.served.name, "system_fingerprint": call.served.fingerprint}


# -- vocabularies ----------------------------------------------------------------------------


@lru_cache(maxsize=len(NAMES))
def open_vocabulary(name: VocabularyName) -> Tokenizer:
    """One of OpenAI's, to compare with the model's own; takes about a second the first time."""
    return Tokenizer.from_tiktoken(name)


def available(name: VocabularyName) -> dict[str, Any]:
    """Whether it is here, and if not, what to do about it."""
    try:
        return {"name": name, "available": True, "size": len(open_vocabulary(name))}
    except UnspoolError as error:
        return {"name": name, "available": False, "why": str(error)}
