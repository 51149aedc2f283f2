"""Ollama's API: generate, chat, embed, and information about models."""

from __future__ import annotations

import hashlib
import json
import time
from datetime import UTC, datetime
from functools import partial
from time import perf_counter
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request
from pydantic import Field, StrictBool
from pydantic_core import from_json
from starlette.responses import Response

from unspool import __version__
from unspool.engine.results import Step
from unspool.lens.embeddings import embedding
from unspool.model.weights import parameter_count
from unspool.server.dialects.answers import (
    Block,
    BlockAnswer,
    BlockClosed,
    BlockGrown,
    Change,
    LogprobFormat,
    was_cut,
)
from unspool.server.dialects.chat_prompt import (
    MAX_TOP_LOGPROBS,
    ChatRequest,
    FunctionTool,
    PreparedChat,
    ToolUse,
    prepare_chat,
    tool_call,
)
from unspool.server.dialects.openai_embeddings import check_dimensions
from unspool.server.http.errors import ApiError, bad_request
from unspool.server.http.events import Wire
from unspool.server.http.replies import JsonReply, new_router, to_json
from unspool.server.runtime.aliases import FOREVER, keep_alive_seconds, llama_defaults
from unspool.server.runtime.registry import ModelEntry, ServedModel
from unspool.server.runtime.schema import (
    ForeignRequest,
    PartialApi,
    Reasons,
    ShortText,
    Strict,
    Tokens,
    ToolName,
    compile_schema,
    sampling_options,
)
from unspool.server.runtime.state import Call, state_of
from unspool.server.runtime.texts import InfillGap, RequestTexts
from unspool.text.chat.messages import ONLY_TEXT

# -- Request schemas of Ollama's endpoints

Format = Literal["", "json"] | dict[str, Any]


class CalledFunction(Strict):
    name: ToolName
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: int | None = None
    description: str | None = None


class OllamaToolCall(Strict):
    function: CalledFunction
    id: ShortText | None = None
    type: Literal["function"] = "function"


class OllamaMessage(PartialApi):
    unsupported_fields: ClassVar[Reasons] = {"images": ONLY_TEXT}

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: ShortText | None = None
    tool_call_id: ShortText | None = None


class _OllamaRequest(ForeignRequest):
    """Parameters that `/api/generate` and `/api/chat` share."""

    model: ShortText | None = None
    stream: bool | None = Field(None, description="false: the complete answer in one response")
    format: Format | None = Field(None, description="json, or a JSON schema")
    options: dict[str, Any] | None = Field(None, description="temperature, num_predict, seed, …")
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    truncate: bool | None = None  # has no effect: long prompts are rejected, or shifted
    shift: bool | None = Field(
        None, description="true: continue beyond the context, dropping the oldest tokens"
    )


class OllamaChatRequest(_OllamaRequest):
    """A conversation to answer; without messages, a model to load."""

    messages: list[OllamaMessage] | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=128)


class GenerateRequest(_OllamaRequest):
    """A prompt to answer; without one, a model to load."""

    unsupported_fields: ClassVar[Reasons] = {
        "images": ONLY_TEXT,
        "template": "Go templates are not supported; send the complete prompt with raw: true",
    }
    noop_values: ClassVar[dict[str, list[Any]]] = {"template": [""]}

    prompt: str | None = None
    suffix: str | None = Field(None, description="text after the answer (infill)")
    system: str | None = None
    context: Tokens | None = Field(None, description="`context` of an earlier answer")
    raw: bool | None = Field(None, description="use the prompt without the chat template")
    parse_special: StrictBool = Field(
        True, description="of a raw prompt: parse control tokens; false: they are text"
    )


class EmbedRequest(ForeignRequest):
    """Texts to embed."""

    model: ShortText | None = None
    input: str | Annotated[list[str], Field(min_length=1, max_length=256)]
    truncate: bool | None = None
    dimensions: int | None = Field(None, ge=1)
    options: dict[str, Any] | None = None


class EmbeddingsRequest(ForeignRequest):
    """One text, for Ollama's older endpoint."""

    model: ShortText | None = None
    prompt: str
    options: dict[str, Any] | None = None


class ShowRequest(Strict):
    """The model to describe."""

    model: ShortText | None = None
    name: ShortText | None = Field(None, description="an older name of `model`")
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: dict[str, Any] | None = None


# -- `POST /api/generate` and `/api/chat` of Ollama's API

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


# -- Ollama's `/api/embed`, and its older `/api/embeddings`


@router.post("/api/embed", summary="Embed texts")
async def embed(body: EmbedRequest, request: Request) -> Response:
    call = await state_of(request).enter(request, body.model)
    call.apply_hints(body)
    return await call.reply(_embed_texts(call, body, perf_counter()))


@router.post("/api/embeddings", summary="Embed a text")
async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
    call = await state_of(request).enter(request, body.model)
    call.apply_hints(body)
    return await call.reply(_embed_prompt(call, body.prompt))


async def _embed_texts(call: Call, body: EmbedRequest, entered: float) -> dict[str, Any]:
    check_dimensions(call, body.dimensions)
    texts = [body.input] if isinstance(body.input, str) else body.input
    prompts = await call.compute(_encode_texts, call, texts, body.truncate is not False)
    vectors = await call.compute_all(partial(embedding, call.served.lm), prompts)
    arrived = call.request.state.arrived
    return {
        "model": body.model or call.served.name,
        "embeddings": [vector.tolist() for vector in vectors],
        "total_duration": nanoseconds(perf_counter() - arrived),
        "load_duration": nanoseconds(entered - arrived),
        "prompt_eval_count": sum(map(len, prompts)),
    }


async def _embed_prompt(call: Call, prompt: str) -> dict[str, Any]:
    (ids,) = await call.compute(_encode_texts, call, [prompt], True)
    (vector,) = await call.compute_all(partial(embedding, call.served.lm), [ids])
    return {"embedding": vector.tolist()}


def _encode_texts(call: Call, texts: list[str], truncates: bool) -> list[list[int]]:
    """Tokenize each text; truncate long ones, or reject them if `truncates` is false."""
    lm = call.served.lm
    if not truncates:
        for text in texts:
            call.check_text(text)
        prompts = [lm.prompt_ids(text) for text in texts]
        call.check_prompt(max(map(len, prompts)))
        return prompts
    max_tokens = min(lm.context, call.settings.max_prompt or lm.context)
    max_length = max_tokens * call.served.longest_token  # further characters cannot fit
    prompts = [lm.tokenizer.encode_prompt(text[:max_length])[:max_tokens] for text in texts]
    return [lm.prompt_ids(ids) for ids in prompts]


# -- Ollama's `/api/tags`, `/api/ps`, `/api/show`, `/api/version`; others are rejected

API_VERSION = "0.12.0"  # the version of Ollama whose API this is; clients check it


@router.get("/api/version", summary="The version of Ollama's API")
async def version() -> Response:
    return JsonReply({"version": API_VERSION, "unspool": __version__})


@router.get("/api/tags", summary="The models of this server")
async def tags(request: Request) -> Response:
    registry = state_of(request).registry
    created = _iso_time(registry.created)
    models = [
        {**_model_json(entry, registry.loaded.get(entry.name)), "modified_at": created}
        for entry in registry.entries.values()
    ]
    return JsonReply({"models": models})


@router.get("/api/ps", summary="The loaded models")
async def running(request: Request) -> Response:
    registry = state_of(request).registry
    entries = {**registry.ephemeral, **registry.entries}
    models = [
        {
            **_model_json(entries[name], served),
            "expires_at": _iso_time(time.time() + _seconds_left(served)),
            "size_vram": 0 if served.lm.model.device == "cpu" else entries[name].size,
            "context_length": served.lm.context,
        }
        for name, served in registry.loaded.items()
    ]
    return JsonReply({"models": models})


@router.post("/api/show", summary="Details of a model")
async def show(body: ShowRequest, request: Request) -> Response:
    registry = state_of(request).registry
    entry = registry.entry(body.model or body.name)
    served = registry.served(entry)
    reply: dict[str, Any] = {
        "modelfile": f"# served by unspool\nFROM {entry.name}\n",
        "parameters": "",
        "template": "",
        "details": _details(served),
        "model_info": {},
        "capabilities": ["completion", "embedding"],
        "modified_at": _iso_time(registry.created),
    }
    if served is not None:  # more is known of a loaded model
        tokenizer = served.lm.tokenizer
        reply["template"] = tokenizer.chat_template or ""
        reply["model_info"] = _model_info(served)
        reply["capabilities"] += ["tools"]
        if served.lm.thought_format is not None:
            reply["capabilities"] += ["thinking"]
    return JsonReply(reply)


def _model_json(entry: ModelEntry, served: ServedModel | None) -> dict[str, Any]:
    name = entry.name if ":" in entry.name else f"{entry.name}:latest"
    return {
        "name": name,
        "model": name,
        "size": entry.size,
        "digest": hashlib.sha256(f"{entry.name} {entry.size}".encode()).hexdigest(),
        "details": _details(served),
    }


def _details(served: ServedModel | None) -> dict[str, Any]:
    details = {"parent_model": "", "format": "gguf", "family": "", "families": None,
             "parameter_size": "", "quantization_level": ""}  # fmt: skip
    if served is None:
        return details
    family = served.lm.config.family
    return details | {
        "family": family,
        "families": [family],
        "parameter_size": _short_count(parameter_count(served.lm.config)),
        "quantization_level": served.lm.model.precision,
    }


def _model_info(served: ServedModel) -> dict[str, Any]:
    """Metadata by GGUF's names."""
    config, tokenizer = served.lm.config, served.lm.tokenizer
    metadata = {
        "context_length": served.lm.context,
        "block_count": config.layers,
        "embedding_length": config.width,
        "feed_forward_length": config.ff_width,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "vocab_size": config.vocab_size,
    }
    return {
        "general.architecture": config.family,
        "general.parameter_count": parameter_count(config),
        **{f"{config.family}.{name}": value for name, value in metadata.items()},
        "tokenizer.ggml.bos_token_id": tokenizer.bos_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_id,
    }


def _short_count(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def _seconds_left(served: ServedModel) -> float:
    if served.keep_alive is None:
        return FOREVER
    since = time.monotonic() if served.users else served.last_used
    return since + served.keep_alive - time.monotonic()


def _iso_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


# -- rejected ----------------------------------------------------------------------

_ALTERNATIVES = {
    "pull": "load models with `unspool serve --model NAME`, which downloads them if needed",
    "push": "models cannot be published from here",
    "create": "start the server with another model: `unspool serve --model NAME=PATH`",
    "copy": "name a model when it is served: `unspool serve --model NAME=PATH`",
    "delete": "stop serving the model, and remove its file",
}


def _add_rejected(name: str) -> None:
    async def reject() -> Response:
        message = f"/api/{name} is not supported: the models are chosen when the server starts"
        raise ApiError(501, f"{message}; {_ALTERNATIVES[name]}", code="not_implemented")

    method = "DELETE" if name == "delete" else "POST"
    router.add_api_route(f"/api/{name}", reject, methods=[method], include_in_schema=False)


for _name in _ALTERNATIVES:
    _add_rejected(_name)
