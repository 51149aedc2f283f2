"""`POST /v1/chat/completions`: OpenAI's chat completions."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from unspool.serve.core.options import check_choices
from unspool.serve.core.state import Call, state_of
from unspool.serve.http.routes import new_router
from unspool.serve.openai.chat_answer import ChatAnswer
from unspool.serve.openai.chat_prompt import PreparedChat, check_chat, prepare_chat
from unspool.serve.openai.chat_schema import ChatRequest
from unspool.serve.openai.thinking import search_chat

router = new_router("OpenAI")


@router.post("/v1/chat/completions", summary="Answer a conversation")
@router.post("/chat/completions", include_in_schema=False)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    state = state_of(request)
    n = body.n or 1
    check_choices(n, state.settings.max_choices)
    if body.unspool is not None and body.unspool.think is not None:
        return await search_chat(body, request)
    call = await state.enter(request, state.adapted_model(body.model, body.lora), n)
    ready = await call.compute(_prepare, call, body)
    warms = ready.options["max_tokens"] == 0
    texts = await call.write([ready.ids], ready.options, n, warms=warms)
    chat = ChatAnswer(call, body, texts, ready.use)
    return call.stream(chat.write) if body.stream else await call.reply(chat.answer())


@router.post("/v1/chat/completions/input_tokens", summary="Count the tokens of a conversation")
@router.post("/chat/completions/input_tokens", include_in_schema=False)
async def count_tokens(body: ChatRequest, request: Request) -> Response:
    call = await state_of(request).enter(request, body.model)
    return await call.reply(call.compute(_count, call, body))


def _count(call: Call, body: ChatRequest) -> dict[str, int]:
    return {"input_tokens": len(_prepare(call, body).ids)}


def _prepare(call: Call, body: ChatRequest) -> PreparedChat:
    check_chat(body)
    return prepare_chat(call, body)
