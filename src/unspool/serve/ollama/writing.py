"""`POST /api/generate` and `/api/chat`: answer, as Ollama does.

Adapters: a request becomes a chat of OpenAI's and goes the same way; what comes of it is put into
Ollama's words, a line of JSON for every piece.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

from fastapi import Request
from pydantic_core import from_json
from starlette.responses import Response

from unspool.engine.steps import Step
from unspool.serve.core.blocks import Block, Change, Closed, Grown, was_cut
from unspool.serve.core.filling import InfillGap
from unspool.serve.core.foreign import keep_alive_seconds, llama_defaults
from unspool.serve.core.options import compile_schema, sampling_options
from unspool.serve.core.state import Call, state_of
from unspool.serve.core.texts import RequestTexts
from unspool.serve.http.errors import bad_request
from unspool.serve.http.routes import JsonReply, new_router, to_json
from unspool.serve.http.wire import Wire
from unspool.serve.ollama.schema import ChatRequest, GenerateRequest, Message
from unspool.serve.openai.answers import BlockAnswer
from unspool.serve.openai.chat_prompt import PreparedChat, ToolUse, prepare_chat, tool_call
from unspool.serve.openai.chat_schema import ChatRequest as Chat
from unspool.serve.openai.logprobs import LogprobFormat

router = new_router("Ollama")
Asking = ChatRequest | GenerateRequest


@router.post("/api/chat", summary="Answer a conversation")
async def chat(body: ChatRequest, request: Request) -> Response:
    return await _answered(body, request) if body.messages else await _loaded(body, request)


@router.post("/api/generate", summary="Answer a prompt")
async def generate(body: GenerateRequest, request: Request) -> Response:
    asked = body.prompt or body.suffix
    return await _answered(body, request) if asked else await _loaded(body, request)


async def _answered(body: Asking, request: Request) -> Response:
    call = await state_of(request).enter(request, body.model)
    entered = perf_counter()
    gap = _gap(body)
    ready = await call.thread(_prepare, call, body, gap)
    texts = await call.write([ready.ids], ready.options, gaps=None if gap is None else [gap])
    answer = _Answer(call, body, texts, ready.use, entered - request.state.arrived)
    if body.stream is False:
        return await call.reply(answer.whole())
    return call.stream_lines(answer.write, lambda error: line(error.ollama()))


async def _loaded(body: Asking, request: Request) -> Response:
    """Nothing to answer: the model is loaded, or, with `keep_alive: 0`, let go."""
    state = state_of(request)
    reason, name = "load", body.model or state.registry.first
    if body.keep_alive is not None and keep_alive_seconds(body.keep_alive) == 0:
        state.registry.unload(name)
        reason = "unload"
    else:
        async with state.call(request, body.model, places=0) as call:
            call.apply_hints(body)
    found = {**_head(name), **_piece(body, ""), "done": True, "done_reason": reason}
    return JsonReply(found)


# -- the request, as a chat -------------------------------------------------------------------


def _gap(body: Asking) -> InfillGap | None:
    """The gap before a suffix: there the prompt is what stands on its left, and no question."""
    if isinstance(body, GenerateRequest) and body.suffix:
        return InfillGap(body.prompt or "", body.suffix)
    return None


def _prepare(call: Call, body: Asking, gap: InfillGap | None) -> PreparedChat:
    if isinstance(body, GenerateRequest):
        return _prepare_generate(call, body, gap)
    functions = [tool.model_dump() for tool in body.tools or ()]
    messages = _messages(body.messages or [])
    return prepare_chat(call, _chat(call, body, messages=messages, tools=functions))


def _prepare_generate(call: Call, body: GenerateRequest, gap: InfillGap | None) -> PreparedChat:
    prompt, lm = body.prompt or "", call.served.lm
    system = [{"role": "system", "content": body.system}] if body.system else []
    chat = _chat(call, body, messages=[*system, {"role": "user", "content": prompt}])
    before = list(body.context or ())
    if not body.raw and gap is None:
        ready = prepare_chat(call, chat)
        ids, options, use = [*before, *ready.ids], ready.options, ready.use
    else:
        use = ToolUse()
        call.apply_hints(chat)
        call.check_text(prompt, body.suffix or "", longer=chat.is_endless)
        if gap is not None:
            ids = gap.prompt(lm)
        else:
            parsed = lm.prompt_ids(prompt, longer=chat.is_endless, parse_special=body.parse_special)
            ids = [*before, *parsed]
        options = sampling_options(lm, chat, top=chat.top_logprobs or 0)
        if chat.response_format is not None:
            options |= {"json": True} if body.format == "json" else {"json_schema": body.format}
        compile_schema(options, call.note)
    options["max_tokens"] = call.token_limit(chat.max_tokens, len(ids))
    return PreparedChat(ids, options, use)


def _chat(call: Call, body: Asking, **more: Any) -> Chat:
    """Ollama's request in OpenAI's words."""
    wanted: dict[str, Any] | None = None
    if isinstance(body.format, dict):
        wanted = {"type": "json_schema", "json_schema": {"schema": body.format}}
    elif body.format == "json":
        wanted = {"type": "json_object"}
    options = dict(body.options or {})
    shifting = _shifting(body, options)
    given = {
        **llama_defaults(options),
        "keep_alive": body.keep_alive,
        "top_logprobs": body.top_logprobs,
        "response_format": wanted,
        **_thinking(call, body),
        **shifting,
        **more,
    }
    return Chat.model_validate(given)


def _shifting(body: Asking, options: dict[str, Any]) -> dict[str, Any]:
    """`shift` lets a text go on beyond the context; `num_keep`, which is taken out of the options,
    says how much of its beginning stays in view (-1: all of the prompt, if that is short)."""
    if not body.shift:
        return {}
    kept = options.pop("num_keep", None)
    known = isinstance(kept, int) and kept > 0
    return {"unspool": {"endless": kept if known else True}}


def _thinking(call: Call, body: Asking) -> dict[str, Any]:
    """Whether the model is to think first, where its template knows of that."""
    knows = call.served.lm.thought_format is not None
    if body.think and not knows:
        raise bad_request(f"{call.served.name!r} does not support thinking", "think")
    if body.think is None or not knows:
        return {}
    if isinstance(body.think, str):
        return {"reasoning_effort": body.think}
    return {"reasoning": {"enabled": True}} if body.think else {"reasoning_effort": "none"}


def _messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Ollama's calls have no names of their own: a result belongs to the first one without."""
    found: list[dict[str, Any]] = []
    open_calls: list[str] = []
    for number, message in enumerate(messages):
        one: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            one["reasoning_content"] = message.thinking
        if message.tool_calls:
            names = [call.id or f"call_{number}_{i}" for i, call in enumerate(message.tool_calls)]
            open_calls += names
            one["tool_calls"] = [
                tool_call(name, call.function.name, json.dumps(call.function.arguments))
                for name, call in zip(names, message.tool_calls, strict=True)
            ]
        if message.role == "tool":
            name = message.tool_call_id or (open_calls.pop(0) if open_calls else "call")
            one |= {"tool_call_id": name}
            one |= {"name": message.tool_name} if message.tool_name else {}
        found.append(one)
    return found


# -- what is answered ------------------------------------------------------------------------


def line(content: Any) -> bytes:
    return to_json(content) + b"\n"


def timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": timestamp()}


def _piece(body: Asking, text: str, **more: Any) -> dict[str, Any]:
    if isinstance(body, GenerateRequest):
        return {"response": text, **more}
    return {"message": {"role": "assistant", "content": text, **more}}


class _Answer(BlockAnswer):
    """An answer, whole or in lines."""

    def __init__(
        self, call: Call, body: Asking, texts: RequestTexts, use: ToolUse, load_seconds: float
    ) -> None:
        super().__init__(call, texts, use)
        self.body, self.load_seconds = body, load_seconds
        self.model = body.model or call.served.name  # by the name it was asked for
        self.arrived = call.request.state.arrived
        self.logprob_format = LogprobFormat(call.served.lm.tokenizer)

    async def whole(self) -> dict[str, Any]:
        blocks = await self.read()
        words = [block for block in blocks if block.is_words]
        calls = [_call(block) for block in blocks if block.name is not None]
        thought = "".join(block.text for block in blocks if block.is_thought)
        more: dict[str, Any] = {"thinking": thought} if thought else {}
        more |= {"tool_calls": calls} if calls else {}
        text = "".join(block.text for block in words)
        logprobs = self._logprobs([step for block in words for step in block.steps])
        return {**_head(self.model), **_piece(self.body, text, **more), **logprobs,
                **self._end()}  # fmt: skip

    async def write(self, wire: Wire) -> None:
        await self.deliver(self._lines, wire)
        wire.put(line({**_head(self.model), **_piece(self.body, ""), **self._end()}))

    def _lines(self, changes: list[Change]) -> bytes:
        pieces = [piece for change in changes if (piece := self._changed(change))]
        return b"".join(line({**_head(self.model), **piece, "done": False}) for piece in pieces)

    def _changed(self, change: Change) -> dict[str, Any] | None:
        if change.block.name is None:
            if not isinstance(change, Grown):
                return None
            if change.block.is_thought:
                return _piece(self.body, "", thinking=change.text)
            return {**_piece(self.body, change.text), **self._logprobs(change.steps)}
        if not isinstance(change, Closed):
            return None
        return _piece(self.body, "", tool_calls=[_call(change.block)])

    def _logprobs(self, steps: list[Step]) -> dict[str, Any]:
        if not self.body.logprobs:
            return {}
        top, ends = self.body.top_logprobs or 0, self.served.lm.end_ids
        return {"logprobs": self.logprob_format.chat(steps, ends, top)["content"]}

    def _end(self) -> dict[str, Any]:
        """Why it ended, and how long everything took, in nanoseconds."""
        generation = self.generation
        seconds = [step.seconds for step in generation.steps]
        found: dict[str, Any] = {
            "done": True,
            "done_reason": "length" if was_cut(generation.finish_reason) else "stop",
            "total_duration": nanoseconds(perf_counter() - self.arrived),
            "load_duration": nanoseconds(self.load_seconds),
            "prompt_eval_count": len(generation.prompt),
            "prompt_eval_duration": nanoseconds(sum(seconds[:1])),
            "eval_count": len(seconds),
            "eval_duration": nanoseconds(sum(seconds[1:])),
        }
        if isinstance(self.body, GenerateRequest) and not self.body.raw:
            found["context"] = [*generation.prompt, *generation.tokens]
        return found


def _call(block: Block) -> dict[str, Any]:
    try:
        arguments = from_json(block.text, allow_partial=True)
        to_json(arguments)  # no number may be too large to be told
    except ValueError:
        arguments = {}
    function = {"name": block.name, "arguments": arguments if isinstance(arguments, dict) else {}}
    return {"id": f"call_{block.id}", "function": function}
