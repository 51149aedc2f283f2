"""llama.cpp's server API: completion, infill, embedding, and information."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Body, Request
from pydantic import Field, StrictBool, StrictInt
from starlette.responses import Response

from unspool import __version__
from unspool.decoding.infill.fill import OtherFile
from unspool.engine.generation import Generation
from unspool.engine.results import Step
from unspool.lens.embeddings import embedding
from unspool.sampling.settings import SamplingSettings
from unspool.server.dialects.answers import LogprobFormat, clamp_logprob
from unspool.server.dialects.openai_completions import start_ids
from unspool.server.http.errors import ApiError, bad_request, unsupported
from unspool.server.http.events import Wire, event
from unspool.server.http.replies import JsonReply, new_router
from unspool.server.runtime.aliases import llama_defaults, sampler_names
from unspool.server.runtime.schema import (
    MAX_PROMPTS,
    ForeignRequest,
    LoraScale,
    SamplingRequest,
    ShortText,
    Strict,
    check_choices,
    compile_schema,
    sampling_options,
)
from unspool.server.runtime.slots import restore_text, save_text
from unspool.server.runtime.state import Call, state_of
from unspool.server.runtime.texts import (
    InfillGap,
    RequestText,
    RequestTexts,
    progress_json,
    timings_json,
)
from unspool.text.chat.messages import ONLY_TEXT

# -- Request schemas of llama.cpp's `/completion` and `/infill`, translated to Unspool's names

MAX_PROBABILITIES = 1000
TokenId = Annotated[StrictInt, Field(ge=0, lt=1 << 31)]
Mixed = Annotated[list[TokenId | str], Field(min_length=1)]


class PromptObject(Strict):
    """A prompt with images, which must be empty."""

    prompt_string: str
    multimodal_data: Annotated[list[Any], Field(max_length=0)] | None = None


MixedPrompts = (
    str | PromptObject | Annotated[list[TokenId | str | Mixed | PromptObject], Field(min_length=1)]
)


def split_prompts(value: MixedPrompts, name: str) -> list[list[int | str]]:
    """Each prompt of a request as a list of texts and ids.

    A list with a bare id is one prompt; any other list has one prompt per entry.
    """
    prompts = value if isinstance(value, list) else [value]
    flat = [part for part in prompts if isinstance(part, int | str)]
    if len(flat) == len(prompts) and any(isinstance(part, int) for part in flat):
        return [flat]
    if len(prompts) > MAX_PROMPTS:
        raise bad_request(f"{name} may hold at most {MAX_PROMPTS} texts, got {len(prompts)}", name)
    return [_row(part) for part in prompts]


def _row(part: int | str | list[int | str] | PromptObject) -> list[int | str]:
    if isinstance(part, PromptObject):
        return [part.prompt_string]
    return part if isinstance(part, list) else [part]


class LlamaCompletionRequest(SamplingRequest):
    """A prompt to complete: text, token ids, or a mix; or a list of prompts."""

    prompt: MixedPrompts
    max_tokens: int | None = Field(None, ge=0, lt=1 << 31, description="also n_predict")
    n_probs: int = Field(
        0, ge=0, le=MAX_PROBABILITIES, description="how many of the most likely tokens to list"
    )
    post_sampling_probs: bool = Field(False, description="probabilities after the sampling stages")
    return_tokens: bool = False
    response_fields: list[ShortText] | None = Field(None, max_length=64)
    parse_special: StrictBool = Field(
        True, description="parse control tokens in the prompt; false: they are text"
    )

    @property
    def prompts(self) -> list[list[int | str]]:
        """Each prompt as a list of texts and ids."""
        return split_prompts(self.prompt, "prompt")

    @classmethod
    def _translated(cls, params: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        params = dict(params)
        nested = params.pop("params", None)  # settings as /props lists them
        if isinstance(nested, dict):
            params = nested | params
            params = {name: value for name, value in params.items() if name not in _SLOT_FIELDS}
        translated = llama_defaults(params)
        for name, aliases in _ALIASES.items():  # llama.cpp reads the first one present
            values = [translated.pop(alias) for alias in (name, *aliases) if alias in translated]
            if values:
                translated[name] = values[0]
        if isinstance(translated.get("logit_bias"), list | dict):
            translated["logit_bias"] = read_logit_bias(translated["logit_bias"])
        if isinstance(translated.get("stop"), list):
            translated["stop"] = [word for word in translated["stop"] if word != ""]
        if translated.get("image_data"):
            raise unsupported("image_data", ONLY_TEXT)
        if translated.get("grammar") == "":
            del translated["grammar"]
        return super()._translated(translated)


_ALIASES = {
    "n_predict": ("max_completion_tokens", "max_tokens"),
    "n_probs": ("logprobs",),
    "n": ("n_cmpl",),
}
_SLOT_FIELDS = ("id", "id_task", "is_processing", "speculative")  # of a slot, not settings


def read_logit_bias(value: list[Any] | dict[str, Any]) -> list[tuple[int | str, float]]:
    """Convert llama.cpp's forms of `logit_bias` to pairs of a token id or text, and an amount.

    Forms: `[[5, -1.0], [" the", false]]`, `[{"token": 5, "bias": -1.0}]` as in
    `generation_settings`, and `{"5": -1.0, " the": false}`. False and null forbid a token.
    """
    if isinstance(value, dict):
        named = [(int(key) if _is_id(key) else key, amount) for key, amount in value.items()]
        return [(token, _amount(token, amount)) for token, amount in named]
    pairs: list[tuple[int | str, float]] = []
    for entry in value:
        if isinstance(entry, dict) and {*entry} == {"token", "bias"}:
            entry = [entry["token"], entry["bias"]]
        if not (isinstance(entry, list | tuple) and len(entry) == 2):
            raise bad_request(
                f"logit_bias must hold [token, amount], got {entry!r:.60}", "logit_bias"
            )
        token, amount = entry
        if isinstance(token, bool) or not isinstance(token, int | str) or token == -1:
            message = f"logit_bias must name tokens by id or text, got {token!r:.60}"
            raise bad_request(message, "logit_bias")
        pairs.append((token, _amount(token, amount)))
    return pairs


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) < 10


def _amount(token: int | str, amount: Any) -> float:
    if amount is False or amount is None:
        return -math.inf
    if isinstance(amount, bool) or not isinstance(amount, int | float):
        message = f"logit_bias of {token!r:.40} must be a number or false, got {amount!r:.40}"
        raise bad_request(message, "logit_bias")
    return float(amount)


# -- llama.cpp's own endpoints: `POST /completion`, `/props`, `/slots` and `/lora-adapters`

router = new_router("llama.cpp")


@router.post("/completion", summary="Continue a text")
@router.post("/completions", include_in_schema=False)
async def completion(body: LlamaCompletionRequest, request: Request) -> Response:
    state = state_of(request)
    n = body.n or 1
    check_choices(n, state.settings.max_choices)
    prompts = body.prompts
    call = await state.enter(request, state.adapted_model(body.model, body.lora), n)
    ids, options = await call.compute(_prepare, call, body, prompts)
    texts = await call.write(ids, options, n, warms=body.max_tokens == 0)
    return await answer_completion(call, body, texts)


async def answer_completion(
    call: Call, body: LlamaCompletionRequest, texts: RequestTexts
) -> Response:
    answer = CompletionAnswer(call, body, texts)
    if body.stream:
        return call.stream(answer.write, lambda error: event(error.llamacpp()))
    return await call.reply(answer.complete())


def _prepare(
    call: Call, body: LlamaCompletionRequest, prompts: list[list[int | str]]
) -> tuple[list[list[int]], dict[str, Any]]:
    ids = [
        encode_mixed(call, prompt, longer=body.is_endless, parse_special=body.parse_special)
        for prompt in prompts
    ]
    return ids, completion_options(call, body, max(map(len, ids)))


def completion_options(
    call: Call, body: LlamaCompletionRequest, prompt_length: int
) -> dict[str, Any]:
    """The options of `LanguageModel.stream` for a request."""
    call.apply_hints(body)
    if body.unspool is not None and body.unspool.return_ is not None:
        raise bad_request(
            "unspool.return is for /v1/completions, /v1/chat/completions, /v1/responses, "
            "/v1/messages and /v1/embeddings",
            "unspool.return",
        )
    options = sampling_options(call.served.lm, body, top=body.n_probs)
    if body.n_probs and body.post_sampling_probs:
        options["explain"] = True
    if not body.end:  # llama.cpp forbids end tokens; in other APIs they are ordinary tokens
        forbidden = dict.fromkeys(call.served.lm.end_ids, -math.inf)
        options["logit_bias"] = options.get("logit_bias", {}) | forbidden
    compile_schema(options, call.note)
    options["max_tokens"] = call.token_limit(body.max_tokens, prompt_length)
    return options


def encode_mixed(
    call: Call, parts: Sequence[int | str], *, longer: bool = False, parse_special: bool = True
) -> list[int]:
    """Tokenize a mix of texts and ids; a text at the beginning gets a BOS token if needed."""
    lm = call.served.lm
    call.check_text(*(part for part in parts if isinstance(part, str)), longer=longer)
    ids: list[int] = []
    for number, part in enumerate(parts):
        if isinstance(part, int):
            ids.append(part)
        elif number:
            ids += lm.tokenizer.encode(part, specials=parse_special)
        else:
            ids += lm.tokenizer.encode_prompt(part, specials=parse_special)
    return lm.prompt_ids(ids or start_ids(call), longer=longer)


class CompletionAnswer:
    """An answer of `/completion`, complete or in chunks."""

    def __init__(self, call: Call, body: LlamaCompletionRequest, texts: RequestTexts) -> None:
        self.call, self.body, self.texts = call, body, texts
        self.tokens = LogprobFormat(call.served.lm.tokenizer)

    async def complete(self) -> Any:
        await self.texts.finish()
        answers = [self._final(number) for number in range(len(self.texts.all))]
        return answers[0] if len(answers) == 1 else answers

    async def write(self, wire: Wire) -> None:
        counts: Counter[int] = Counter()
        if self.body.return_progress:
            self.texts.watch_progress(lambda *news: wire.write(event(self._progress(*news))))

        def send(steps: list[tuple[int, Step]]) -> None:
            chunks = []
            for number, step in steps:
                counts[number] += 1
                chunks.append(event(self._chunk(number, step, counts[number])))
            wire.write(b"".join(chunks))

        await self.texts.deliver_final(send, wire)
        for number in range(len(self.texts.all)):
            last = self._final(number) | {"content": "", "tokens": []}
            last.pop("completion_probabilities", None)  # each was sent with its token
            wire.write(event(last))

    def _chunk(self, number: int, step: Step, count: int) -> dict[str, Any]:
        prompt = self.texts.prompts[number // self.texts.n]
        chunk = {"index": number, "content": step.text, "tokens": [step.token], "stop": False,
                 "id_slot": -1, "tokens_predicted": count,
                 "tokens_evaluated": len(prompt)}  # fmt: skip
        if self.body.timings_per_token:
            chunk["timings"] = timings_json(self.texts.texts[number])
        return chunk | self._probabilities([step])

    def _progress(self, number: int, computed: int) -> dict[str, Any]:
        text = self.texts.texts[number]
        length = len(text.generation.prompt)
        chunk = {"index": number, "content": "", "tokens": [], "stop": False, "id_slot": -1,
                 "tokens_predicted": 0, "tokens_evaluated": length}  # fmt: skip
        return chunk | progress_json(text, computed, timed=bool(self.body.timings_per_token))

    def _final(self, number: int) -> dict[str, Any]:
        text = self.texts.all[number]
        generation, lm = text.generation, self.call.served.lm
        fields = {
            "index": number,
            "content": generation.text,
            "tokens": generation.tokens if self.body.return_tokens else [],
            "id_slot": -1,
            "stop": True,
            "model": self.call.served.name,
            "tokens_predicted": len(generation.steps),
            "tokens_evaluated": len(generation.prompt),
            "generation_settings": self._settings(text),
            "prompt": lm.tokenizer.decode(generation.prompt),
            "has_new_line": "\n" in generation.text,
            "truncated": generation.finish_reason == "context" or _has_dropped_tokens(generation),
            **_ending(text),
            "tokens_cached": text.reused,
            "timings": timings_json(text),
            **self._probabilities(generation.steps),
        }
        return _select_fields(fields, self.body.response_fields)

    def _settings(self, text: RequestText) -> dict[str, Any]:
        """The settings of a text by llama.cpp's names; valid as parameters of a request."""
        limits, body = text.generation.request.limits, self.body
        return {
            **settings_json(text.generation.settings),
            "dry_sequence_breakers": body.dry_sequence_breakers or [],
            "n_ctx": self.call.served.lm.context,
            "n_predict": limits.max_tokens,
            "max_tokens": limits.max_tokens,
            "stop": list(limits.stop),
            "ignore_eos": not limits.end_ids,
            "logit_bias": [  # null forbids a token
                {"token": token, "bias": bias if math.isfinite(bias) else None}
                for token, bias in text.generation.settings.logit_bias.items()
            ],
            "stream": bool(body.stream),
            "n_probs": body.n_probs,
            "post_sampling_probs": body.post_sampling_probs,
            "timings_per_token": bool(body.timings_per_token),
            "grammar": body.grammar or "",
            "lora": [item.model_dump() for item in body.lora or ()],
        }

    def _probabilities(self, steps: list[Step]) -> dict[str, Any]:
        if not self.body.n_probs:
            return {}
        return {"completion_probabilities": [self._probability(step) for step in steps]}

    def _probability(self, step: Step) -> dict[str, Any]:
        """Log-probabilities of the model, or probabilities after the sampling stages."""
        best = step.candidates[: self.body.n_probs]
        if self.body.post_sampling_probs:
            top = [{**self._token(c.token), "prob": c.probability} for c in best if c.probability]
            return {**self._token(step.token), "prob": step.probability, "top_probs": top}
        top = [{**self._token(c.token), "logprob": clamp_logprob(c.logprob)} for c in best]
        return {
            **self._token(step.token),
            "logprob": clamp_logprob(step.logprob),
            "top_logprobs": top,
        }

    def _token(self, token: int) -> dict[str, Any]:
        return {
            "id": token,
            "token": self.tokens.bytes(token).decode("utf-8", "replace"),
            "bytes": list(self.tokens.bytes(token)),
        }


def _ending(text: RequestText) -> dict[str, Any]:
    by = text.stream.stopped_by
    reason = text.generation.finish_reason
    kind = "word" if by is not None else "eos" if reason == "stop" else "limit"
    return {"stop_type": kind, "stopping_word": by or ""}


def _has_dropped_tokens(generation: Generation) -> bool:
    """Whether the text exceeded the context, and its oldest tokens were dropped."""
    length = len(generation.prompt) + len(generation.steps)
    return generation.request.limits.num_truncated(length) > 0


def _select_fields(answer: dict[str, Any], fields: list[str] | None) -> dict[str, Any]:
    """The fields that a request names; all by default. `a/b` is field b of a."""
    if not fields:
        return answer
    selected = {}
    for field in fields:
        value: Any = answer
        for part in field.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            selected[field] = value
    return selected


def settings_json(settings: SamplingSettings) -> dict[str, Any]:
    """Sampling settings by llama.cpp's names."""
    names = ("seed", "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p",
             "min_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "typical_p",
             "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base",
             "dry_allowed_length", "mirostat_eta")  # fmt: skip
    return {
        **{name: getattr(settings, name) for name in names},
        "repeat_penalty": settings.repetition_penalty,
        "repeat_last_n": settings.penalty_window,
        "dry_penalty_last_n": settings.dry_window,
        "mirostat": 2 if settings.mirostat_tau else 0,
        "mirostat_tau": settings.mirostat_tau or 5.0,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.9,
        "min_keep": 0,
        "samplers": sampler_names(settings.stages),
    }


# -- information ---------------------------------------------------------------------------


@router.get("/props", summary="The model and its default settings")
async def props(request: Request, model: str | None = None) -> Response:
    state = state_of(request)
    async with state.call(request, model, places=0) as call:
        lm = call.served.lm
        tokenizer = lm.tokenizer
        first, last = (
            "" if token is None else tokenizer.token_text(token)
            for token in (tokenizer.bos_id, tokenizer.eos_id)
        )
        defaults = {**settings_json(SamplingSettings()), "n_predict": -1, "seed": -1}
        slot = {"id": 0, "id_task": -1, "n_ctx": lm.context, "is_processing": False,
                "speculative": False, "params": defaults}  # fmt: skip
        reply = {
            "default_generation_settings": slot,
            "total_slots": state.settings.max_running,
            "model_alias": call.served.name,
            "model_path": call.served.name,
            "modalities": {"vision": False, "audio": False},
            "chat_template": tokenizer.chat_template or "",
            "bos_token": first,
            "eos_token": last,
            "build_info": f"unspool-{__version__}",
            "is_sleeping": False,
        }
    return JsonReply(reply)


@router.get("/slots", summary="Places for texts, and which are in use")
async def slots(request: Request, fail_on_no_slot: str | None = None) -> Response:
    state = state_of(request)
    total, running = state.settings.max_running, state.admission.running
    if fail_on_no_slot and running >= total:
        raise ApiError(503, "no slot available", code="queue_full", retry_after=1)
    loaded = state.registry.loaded.get(state.registry.first)
    context = 0 if loaded is None else loaded.lm.context
    listed = [
        {"id": i, "id_task": -1, "n_ctx": context, "speculative": False,
         "is_processing": i < running}
        for i in range(total)
    ]  # fmt: skip
    return JsonReply(listed)


class SlotRequest(ForeignRequest):
    """The file of a saved slot."""

    model: str | None = None
    filename: ShortText | None = None


@router.post("/slots/{slot}", summary="Save the last text of a slot, restore it, or erase it")
async def change_slot(
    slot: int,
    request: Request,
    action: Literal["save", "restore", "erase"],
    body: Annotated[SlotRequest, Body(default_factory=lambda: SlotRequest.model_validate({}))],
) -> Response:
    """Needs `--slot-save-path`. After `restore`, the text continues without prefill, also after a
    restart of the server. With API keys, slots and files are separate for each key."""
    state, user = state_of(request), request.state.user
    state.slots.check(slot)
    if action == "erase":
        return JsonReply({"id_slot": slot, "n_erased": state.slots.erase(user, slot)})
    if body.filename is None:
        raise bad_request("filename is missing; it is required", "filename")
    path = state.slots.file(user, body.filename)
    call = await state.enter(request, body.model)
    reply: dict[str, Any] = {"id_slot": slot, "filename": body.filename}
    if action == "save":
        tokens = state.slots.text(user, slot, call.served.name)
        if not tokens:
            raise bad_request(f"slot {slot} has no text yet", "id_slot")
        reply |= await call.compute(save_text, call.served.lm, tokens, path)
    else:
        tokens, restored = await call.compute(restore_text, call.served.lm, path)
        state.slots.record(user, call.served.name, tokens, slot)
        reply |= restored
    return JsonReply(reply)


@router.get("/lora-adapters", summary="Adapters that a request may name under `lora`")
async def lora_adapters(request: Request) -> Response:
    adapters = state_of(request).registry.adapters().values()
    listed = [
        {"id": i, "path": adapter.short_name, "scale": 0.0, "task_name": "", "prompt_prefix": ""}
        for i, adapter in enumerate(adapters)
    ]
    return JsonReply(listed)


@router.post("/lora-adapters", include_in_schema=False)
async def set_lora_adapters(body: list[LoraScale], request: Request) -> Response:
    if state_of(request).adapted_model(None, body) is not None:
        message = "adapters cannot be set for all requests: use `lora` in a request"
        raise ApiError(501, message, code="not_implemented")
    return JsonReply({"success": True})


@router.post("/props", include_in_schema=False)
async def read_only() -> Response:
    message = (
        "this is read-only: settings are part of each request, prefixes are cached automatically"
    )
    raise ApiError(501, message, code="not_implemented")


# -- `POST /infill`: fill in the middle, as in llama.cpp's server


class ExtraFile(Strict):
    """A further file, which the model reads first."""

    text: str
    filename: ShortText = "tmp"
    time: Any = None  # of the copy: a number, or the result of Vim's reltime()


class InfillRequest(LlamaCompletionRequest):
    """A gap between two texts; settings as in `/completion`."""

    prompt: str = Field("", description="further text after input_prefix")
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Field(max_length=256)] | None = None


@router.post("/infill", summary="Fill a gap between two texts")
async def infill(body: InfillRequest, request: Request) -> Response:
    state = state_of(request)
    n = body.n or 1
    check_choices(n, state.settings.max_choices)
    call = await state.enter(request, state.adapted_model(body.model, body.lora), n)
    gap, prompt, options = await call.compute(_prepare_infill, call, body)
    warms = body.max_tokens == 0
    texts = await call.write([prompt], options, n, gaps=[gap], warms=warms)
    return await answer_completion(call, body, texts)


def _prepare_infill(call: Call, body: InfillRequest) -> tuple[InfillGap, list[int], dict[str, Any]]:
    extra = body.input_extra or []
    prefix = body.input_prefix + body.prompt
    call.check_text(prefix, body.input_suffix, *(chunk.text for chunk in extra))
    others = tuple(OtherFile(chunk.filename, chunk.text) for chunk in extra)
    gap = InfillGap(prefix, body.input_suffix, others)
    prompt = gap.prompt(call.served.lm)
    return gap, prompt, completion_options(call, body, len(prompt))


# -- llama.cpp's `/embedding` and `/embeddings`, which differ from OpenAI's

_INT16_SCALE = 32760.0  # largest number of vectors that are scaled for 16-bit integers


class LlamaEmbeddingRequest(ForeignRequest):
    """Texts, token ids, or a mix; `content` is an older name for `input`."""

    model: str | None = None
    input: MixedPrompts | None = None
    content: MixedPrompts | None = None
    encoding_format: Literal["float"] | None = None
    embd_normalize: int = Field(
        2, ge=0, le=64, description="0: largest number is 32760; 1, 2, ...: length by this norm"
    )


@router.post("/embedding", include_in_schema=False)
@router.post("/embeddings", summary="Embed texts (mean-pooled hidden states)")
async def llama_embeddings(body: LlamaEmbeddingRequest, request: Request) -> Response:
    if (body.input is None) == (body.content is None):
        raise bad_request("give either input or content", "input")
    content = body.input if body.input is not None else body.content
    assert content is not None
    prompts = split_prompts(content, "input")
    call = await state_of(request).enter(request, body.model)
    call.apply_hints(body)
    return await call.reply(_embed_prompts(call, prompts, body.embd_normalize))


async def _embed_prompts(
    call: Call, prompts: list[list[int | str]], norm: int
) -> list[dict[str, Any]]:
    ids = await call.compute(_encode, call, prompts)
    vectors = await call.compute_all(partial(embedding, call.served.lm), ids)
    return [
        {"index": i, "embedding": [_scaled(vector, norm).tolist()]}
        for i, vector in enumerate(vectors)
    ]


def _encode(call: Call, prompts: list[list[int | str]]) -> list[list[int]]:
    # Texts to embed are content, not prompts: control tokens in them are text.
    ids = [encode_mixed(call, prompt, parse_special=False) for prompt in prompts]
    for row in ids:
        call.check_prompt(len(row))
    return ids


def _scaled(vector: Any, norm: int) -> Any:
    """Scale a unit vector by another norm."""
    if norm == 2:
        return vector
    if norm == 0:
        return vector * (_INT16_SCALE / max(float(np.abs(vector).max()), 1e-12))
    return vector / max(float(np.linalg.norm(vector, norm)), 1e-12)
