"""`POST /api/generate` and `/api/chat` of Ollama's API.

Adapters: a request is translated to an OpenAI chat, and the result to Ollama's JSON lines.
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
from unspool.serve.core.blocks import Block, BlockClosed, BlockGrown, Change, was_cut
from unspool.serve.core.filling import InfillGap
from unspool.serve.core.foreign import keep_alive_seconds, llama_defaults
from unspool.serve.core.options import compile_schema, sampling_options
from unspool.serve.core.state import Call, state_of
from unspool.serve.core.texts import RequestTexts
from unspool.serve.http.errors import bad_request
from unspool.serve.http.routes import JsonReply, new_router, to_json
from unspool.serve.http.wire import Wire
from unspool.serve.ollama.schema import GenerateRequest, OllamaChatRequest, OllamaMessage
from unspool.serve.openai.answers import BlockAnswer
from unspool.serve.openai.chat_prompt import PreparedChat, ToolUse, prepare_chat, tool_call
from unspool.serve.openai.chat_schema import ChatRequest
from unspool.serve.openai.logprobs import LogprobFormat

router = new_router("Ollama")
OllamaRequest = OllamaChatRequest | GenerateRequest


@router.post("/api/chat", summary="Answer a conversation")
async def chat(body: OllamaChatRequest, request: Request) -> Response:
    return await _answer(body, request) if body.messages else await _load_model(body, request)


@router.post("/api/generate", summary="Answer a prompt")
async def generate(body: GenerateRequest, request: Request) -> Response:
    has_prompt = body.prompt or body.suffix
    return await _answer(body, request) if has_prompt else await _load_model(body, request)


async def _answer(body: OllamaRequest, request: Request) -> Response:
    call = await state_of(request).enter(request, body.model)
    entered = perf_counter()
    gap = _gap(body)
    ready = await call.compute(_prepare, call, body, gap)
    texts = await call.write([ready.ids], ready.options, gaps=None if gap is None else [gap])
    answer = _OllamaAnswer(call, body, texts, ready.use, entered - request.state.arrived)
    if body.stream is False:
        return await call.reply(answer.complete())
    return call.stream_lines(answer.write, lambda error: line(error.ollama()))


async def _load_model(body: OllamaRequest, request: Request) -> Response:
    """Load the model, or unload it with `keep_alive: 0`; the request has no prompt."""
    state = state_of(request)
    reason, name = "load", body.model or state.registry.first
    if body.keep_alive is not None and keep_alive_seconds(body.keep_alive) == 0:
        state.registry.unload(name)
        reason = "unload"
    else:
        async with state.call(request, body.model, places=0) as call:
            call.apply_hints(body)
    return JsonReply({**_head(name), **_piece(body, ""), "done": True, "done_reason": reason})


# -- the request, as a chat -------------------------------------------------------------------


def _gap(body: OllamaRequest) -> InfillGap | None:
    """The gap between prompt and suffix; None without a suffix."""
    if isinstance(body, GenerateRequest) and body.suffix:
        return InfillGap(body.prompt or "", body.suffix)
    return None


def _prepare(call: Call, body: OllamaRequest, gap: InfillGap | None) -> PreparedChat:
    if isinstance(body, GenerateRequest):
        return _prepare_generate(call, body, gap)
    functions = [tool.model_dump() for tool in body.tools or ()]
    messages = _openai_messages(body.messages or [])
    return prepare_chat(call, _to_openai_chat(call, body, messages=messages, tools=functions))


def _prepare_generate(call: Call, body: GenerateRequest, gap: InfillGap | None) -> PreparedChat:
    prompt, lm = body.prompt or "", call.served.lm
    system = [{"role": "system", "content": body.system}] if body.system else []
    chat = _to_openai_chat(call, body, messages=[*system, {"role": "user", "content": prompt}])
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


def _to_openai_chat(call: Call, body: OllamaRequest, **extra: Any) -> ChatRequest:
    """Translate Ollama's request to OpenAI's."""
    response_format: dict[str, Any] | None = None
    if isinstance(body.format, dict):
        response_format = {"type": "json_schema", "json_schema": {"schema": body.format}}
    elif body.format == "json":
        response_format = {"type": "json_object"}
    options = dict(body.options or {})
    endless = _endless(body, options)
    params = {
        **llama_defaults(options),
        "keep_alive": body.keep_alive,
        "top_logprobs": body.top_logprobs,
        "response_format": response_format,
        **_thinking(call, body),
        **endless,
        **extra,
    }
    return ChatRequest.model_validate(params)


def _endless(body: OllamaRequest, options: dict[str, Any]) -> dict[str, Any]:
    """Translate `shift`, which continues a text beyond the context. `num_keep`, which is removed
    from the options, is the number of first tokens that stay visible (-1: the prompt)."""
    if not body.shift:
        return {}
    num_keep = options.pop("num_keep", None)
    has_number = isinstance(num_keep, int) and num_keep > 0
    return {"unspool": {"endless": num_keep if has_number else True}}


def _thinking(call: Call, body: OllamaRequest) -> dict[str, Any]:
    """Whether the model should reason first, if it can."""
    can_reason = call.served.lm.thought_format is not None
    if body.think and not can_reason:
        raise bad_request(f"{call.served.name!r} does not support thinking", "think")
    if body.think is None or not can_reason:
        return {}
    if isinstance(body.think, str):
        return {"reasoning_effort": body.think}
    return {"reasoning": {"enabled": True}} if body.think else {"reasoning_effort": "none"}


def _openai_messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Ollama's tool calls may lack ids: a result belongs to the first open call."""
    converted: list[dict[str, Any]] = []
    open_calls: list[str] = []
    for number, message in enumerate(messages):
        fields: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            fields["reasoning_content"] = message.thinking
        if message.tool_calls:
            names = [call.id or f"call_{number}_{i}" for i, call in enumerate(message.tool_calls)]
            open_calls += names
            fields["tool_calls"] = [
                tool_call(name, call.function.name, json.dumps(call.function.arguments))
                for name, call in zip(names, message.tool_calls, strict=True)
            ]
        if message.role == "tool":
            name = message.tool_call_id or (open_calls.pop(0) if open_calls else "call")
            fields |= {"tool_call_id": name}
            fields |= {"name": message.tool_name} if message.tool_name else {}
        converted.append(fields)
    return converted


# -- the answer ---------------------------------------------------------------------


def line(content: Any) -> bytes:
    return to_json(content) + b"\n"


def timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": timestamp()}


def _piece(body: OllamaRequest, text: str, **extra: Any) -> dict[str, Any]:
    if isinstance(body, GenerateRequest):
        return {"response": text, **extra}
    return {"message": {"role": "assistant", "content": text, **extra}}


class _OllamaAnswer(BlockAnswer):
    """An answer, complete or in JSON lines."""

    def __init__(
        self,
        call: Call,
        body: OllamaRequest,
        texts: RequestTexts,
        use: ToolUse,
        load_seconds: float,
    ) -> None:
        super().__init__(call, texts, use)
        self.body, self.load_seconds = body, load_seconds
        self.model = body.model or call.served.name  # as the request names it
        self.arrived = call.request.state.arrived
        self.logprob_format = LogprobFormat(call.served.lm.tokenizer)

    async def complete(self) -> dict[str, Any]:
        blocks = await self.read()
        text_blocks = [block for block in blocks if block.is_text]
        calls = [_tool_call_json(block) for block in blocks if block.name is not None]
        thinking = "".join(block.text for block in blocks if block.is_thought)
        extra: dict[str, Any] = {"thinking": thinking} if thinking else {}
        extra |= {"tool_calls": calls} if calls else {}
        text = "".join(block.text for block in text_blocks)
        logprobs = self._logprobs([step for block in text_blocks for step in block.steps])
        return {**_head(self.model), **_piece(self.body, text, **extra), **logprobs,
                **self._end()}  # fmt: skip

    async def write(self, wire: Wire) -> None:
        await self.deliver(self._lines, wire)
        wire.write(line({**_head(self.model), **_piece(self.body, ""), **self._end()}))

    def _lines(self, changes: list[Change]) -> bytes:
        pieces = [piece for change in changes if (piece := self._change_piece(change))]
        return b"".join(line({**_head(self.model), **piece, "done": False}) for piece in pieces)

    def _change_piece(self, change: Change) -> dict[str, Any] | None:
        if change.block.name is None:
            if not isinstance(change, BlockGrown):
                return None
            if change.block.is_thought:
                return _piece(self.body, "", thinking=change.text)
            return {**_piece(self.body, change.text), **self._logprobs(change.steps)}
        if not isinstance(change, BlockClosed):
            return None
        return _piece(self.body, "", tool_calls=[_tool_call_json(change.block)])

    def _logprobs(self, steps: list[Step]) -> dict[str, Any]:
        if not self.body.logprobs:
            return {}
        top, ends = self.body.top_logprobs or 0, self.served.lm.end_ids
        return {"logprobs": self.logprob_format.chat(steps, ends, top)["content"]}

    def _end(self) -> dict[str, Any]:
        """The stop reason, and durations in nanoseconds."""
        generation = self.generation
        seconds = [step.seconds for step in generation.steps]
        fields: dict[str, Any] = {
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
            fields["context"] = [*generation.prompt, *generation.tokens]
        return fields


def _tool_call_json(block: Block) -> dict[str, Any]:
    try:
        arguments = from_json(block.text, allow_partial=True)
        to_json(arguments)  # fails for numbers that JSON cannot represent
    except ValueError:
        arguments = {}
    function = {"name": block.name, "arguments": arguments if isinstance(arguments, dict) else {}}
    return {"id": f"call_{block.id}", "function": function}
