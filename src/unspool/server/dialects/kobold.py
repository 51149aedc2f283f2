"""KoboldAI's API as KoboldCpp serves it, for SillyTavern, mikupad and KoboldAI Lite.

Parameters and answers follow LostRuins/koboldcpp (koboldcpp.py, gpttype_adapter.cpp). As there, a
parameter that the server does not have is ignored; the header `x-unspool-ignored` names it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Annotated, Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response

from unspool.engine.results import Step
from unspool.server.dialects.answers import LogprobFormat
from unspool.server.dialects.llamacpp import (
    LlamaCompletionRequest,
    completion_options,
    encode_mixed,
)
from unspool.server.dialects.openai_completions import start_ids
from unspool.server.http.errors import bad_request, invalid
from unspool.server.http.events import Wire, event
from unspool.server.http.replies import JsonReply, new_router
from unspool.server.runtime.schema import MAX_STOPS, finish_reason
from unspool.server.runtime.state import Call, state_of
from unspool.server.runtime.texts import RequestText, RequestTexts

router = new_router("KoboldAI")

UNITED_VERSION = "1.2.5"  # of KoboldAI's API, as KoboldCpp has it: stop sequences since 1.2.2
CPP_VERSION = "1.76"  # of KoboldCpp's extensions: streams, tokencount, grammar, min_p
MAX_TOP_LOGPROBS = 20
_GENKEY = Annotated[str, Field(max_length=200)]
_Number = float | None
_Whole = int | None
_Words = list[str] | None

# -- The request: KoboldCpp's names and defaults, translated to those of /completion


class KoboldRequest(BaseModel):
    """A prompt to continue. Unknown parameters are ignored, as in KoboldCpp."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    prompt: str = ""
    memory: str | None = Field(None, description="text before the prompt that is never cut off")
    max_length: int | None = Field(None, ge=0, lt=1 << 31, description="most tokens to generate")
    max_context_length: int | None = Field(
        None, ge=1, lt=1 << 31, description="of a longer prompt the beginning is cut off"
    )
    temperature: _Number = None
    top_k: _Whole = None
    top_p: _Number = None
    min_p: _Number = None
    typical: _Number = None
    rep_pen: _Number = None
    rep_pen_range: _Whole = None
    presence_penalty: _Number = None
    mirostat: _Whole = None
    mirostat_tau: _Number = None
    mirostat_eta: _Number = None
    dynatemp_range: _Number = None
    dynatemp_exponent: _Number = None
    dry_multiplier: _Number = None
    dry_base: _Number = None
    dry_allowed_length: _Whole = None
    dry_penalty_last_n: _Whole = None
    dry_sequence_breakers: _Words | str = Field(None, description="a list, or a list as JSON")
    xtc_threshold: _Number = None
    xtc_probability: _Number = None
    sampler_order: list[int] | None = Field(
        None, max_length=16, description="0 top_k, 2 top_p and min_p, 4 typical, 5 temperature, "
        "6 rep_pen; 1 top_a and 3 tfs are ignored"
    )  # fmt: skip
    sampler_seed: int | None = Field(None, lt=1 << 63, description="0 or less: random")
    stop_sequence: _Words = None
    ban_eos_token: bool | None = None
    use_default_badwordsids: bool | None = Field(None, description="same as ban_eos_token")
    grammar: str | None = Field(None, description="GBNF")
    logit_bias: dict[str, float] | None = None
    custom_token_bans: str | None = Field(None, description="token ids, separated by commas")
    banned_tokens: _Words = Field(None, description="phrases that are not generated")
    banned_strings: _Words = Field(None, description="same as banned_tokens")
    logprobs: int | bool | None = Field(None, description="candidates to list with each token")
    genkey: _GENKEY | None = Field(None, description="names the text for check and abort")

    @property
    def num_logprobs(self) -> int:
        count = 5 if self.logprobs is True else int(self.logprobs or 0)
        return max(0, min(count, MAX_TOP_LOGPROBS))

    def ignored(self) -> list[str]:
        """Parameters that have an effect in KoboldCpp, but not here."""
        extra, stops = self.model_extra or {}, self.stop_sequence or []
        names = [name for name in _NEUTRAL if extra.get(name) not in (None, _NEUTRAL[name])]
        names += ["stop_sequence"] if len(stops) > MAX_STOPS else []
        return names + (["banned_tokens"] if any("|" in text for text in self._phrases()) else [])

    def _phrases(self) -> list[str]:
        return [text for text in self.banned_tokens or self.banned_strings or () if text]

    def completion(self) -> LlamaCompletionRequest:
        """The same request to `/completion`. Raises 400 for values out of range."""
        groups = _GROUPS if self.sampler_order is None else set(self.sampler_order)
        values: dict[str, Any] = {"prompt": "", "n_probs": self.num_logprobs}
        values["max_tokens"] = 180 if self.max_length is None else self.max_length
        for number, names in _SETTINGS.items():
            for name, (setting, default) in names.items():
                value = getattr(self, name)
                if number is None or number in groups:
                    values[setting] = default if value is None else value
        values |= self._stages(values)
        if self.mirostat:
            values["mirostat"] = self.mirostat
            values["mirostat_tau"] = 5.0 if self.mirostat_tau is None else self.mirostat_tau
            values["mirostat_eta"] = 0.1 if self.mirostat_eta is None else self.mirostat_eta
        if (self.sampler_seed or 0) > 0:
            values["seed"] = self.sampler_seed
        if self.ban_eos_token or self.use_default_badwordsids:
            values["end"] = False
        if self.grammar:
            values["grammar"] = self.grammar
        values["stop"] = [text for text in self.stop_sequence or () if text][:MAX_STOPS]
        values["dry_sequence_breakers"] = self._breakers()
        values["logit_bias"] = self._biases()
        phrases = [text for text in self._phrases() if "|" not in text]
        if phrases:
            values["unspool"] = {"guard": [f"ban={'|'.join(phrases)}"]}
        try:
            request = LlamaCompletionRequest.model_validate(values)
        except ValidationError as error:
            raise invalid(error.errors()) from None
        request.ignored.extend(self.ignored())
        return request

    def _stages(self, values: dict[str, Any]) -> dict[str, Any]:
        """The order of the stages, unless the default order does the same, which is faster."""
        numbers = _GROUPS if self.sampler_order is None else self.sampler_order
        order = tuple(number for number in dict.fromkeys(numbers) if number in _STAGES)
        has_others = values.get("dry_multiplier") or values.get("xtc_probability")
        if self.mirostat or (order == _GROUPS and not has_others):
            return {}
        stages = [stage for number in order for stage in _STAGES.get(number, ())]
        # DRY always comes first and XTC last.
        return {"stages": ["logit_bias", "dry", *stages, "xtc"]}

    def _breakers(self) -> list[str] | None:
        breakers = self.dry_sequence_breakers
        if not isinstance(breakers, str):
            return breakers or None
        try:  # SillyTavern sends the list as JSON
            breakers = json.loads(breakers or "[]")
        except (ValueError, RecursionError):
            breakers = None
        if not isinstance(breakers, list) or not all(isinstance(item, str) for item in breakers):
            raise bad_request(
                "dry_sequence_breakers must be a list of texts, or such a list as JSON"
            )
        return breakers or None

    def _biases(self) -> list[tuple[int | str, float]] | None:
        pairs: dict[int, float] = {}
        for token, amount in (self.logit_bias or {}).items():
            if not (token.isascii() and token.isdigit() and len(token) < 10):
                raise bad_request(f"logit_bias must name tokens by id, got {token[:40]!r}")
            pairs[int(token)] = amount
        for token in (self.custom_token_bans or "").split(","):
            if token.strip().isascii() and token.strip().isdigit() and len(token) < 12:
                pairs[int(token)] = float("-inf")
        return list(pairs.items()) or None


_GROUPS = (6, 0, 4, 2, 5)  # KoboldCpp's default order, [6, 0, 1, 3, 4, 2, 5], without 1 and 3
_STAGES = {
    0: ("top_k",),
    2: ("top_p", "min_p"),
    4: ("typical_p",),
    5: ("dynamic_temperature", "temperature"),
    6: ("repetition_penalty", "presence_penalty"),
}
_SETTINGS: dict[int | None, dict[str, tuple[str, Any]]] = {  # by sampler; None: always used
    0: {"top_k": ("top_k", 100)},
    2: {"top_p": ("top_p", 0.92), "min_p": ("min_p", 0.0)},
    4: {"typical": ("typical_p", 1.0)},
    5: {
        "temperature": ("temperature", 0.7),
        "dynatemp_range": ("dynatemp_range", 0.0),
        "dynatemp_exponent": ("dynatemp_exponent", 1.0),
    },
    6: {
        "rep_pen": ("repetition_penalty", 1.0),
        "rep_pen_range": ("repeat_last_n", 320),
        "presence_penalty": ("presence_penalty", 0.0),
    },
    None: {
        "dry_multiplier": ("dry_multiplier", 0.0),
        "dry_base": ("dry_base", 1.75),
        "dry_allowed_length": ("dry_allowed_length", 2),
        "dry_penalty_last_n": ("dry_window", 320),
        "xtc_threshold": ("xtc_threshold", 0.2),
        "xtc_probability": ("xtc_probability", 0.0),
    },
}
# Parameters of KoboldCpp that this server lacks, with the value that has no effect there.
_NEUTRAL = {"tfs": 1, "top_a": 0, "rep_pen_slope": 1, "smoothing_factor": 0, "images": [],
            "frequency_penalty": 0, "singleline": False, "bypass_eos": False,
            "render_special": False, "trim_stop": True}  # fmt: skip

# -- Generation


@router.post("/api/v1/generate", summary="Continue a text")
@router.post("/api/latest/generate", include_in_schema=False)
async def kobold_generate(body: KoboldRequest, request: Request) -> Response:
    call, texts = await _begin(body, request)
    return await call.reply(_complete(call, body, texts))


@router.post("/api/extra/generate/stream", summary="Continue a text, as server-sent events")
async def kobold_stream(body: KoboldRequest, request: Request) -> Response:
    call, texts = await _begin(body, request)
    formats = LogprobFormat(call.served.lm.tokenizer)

    async def write(wire: Wire) -> None:
        def send(steps: list[tuple[int, Step]]) -> None:
            chunks = [_chunk(step, body.num_logprobs, formats) for _, step in steps]
            wire.write(b"".join(chunks))

        await texts.deliver_final(send, wire)
        wire.write(_message({"token": "", "finish_reason": _reason(texts.all[0])}))

    return call.stream(write, lambda error: _message(error.kobold()))


async def _begin(body: KoboldRequest, request: Request) -> tuple[Call, RequestTexts]:
    state = state_of(request)
    completion = body.completion()
    call = await state.enter(request, None)
    ids, options = await call.compute(_prepare, call, body, completion)
    texts = await call.write([ids], options)
    running = _running(request)[_key(request, body.genkey)]
    running.append(texts)
    request.state.resources.callback(_forget, request, body.genkey, texts)
    return call, texts


def _prepare(
    call: Call, body: KoboldRequest, completion: LlamaCompletionRequest
) -> tuple[list[int], dict[str, Any]]:
    """The tokens of the prompt, cut off at the beginning where it is too long, and the options."""
    lm, memory = call.served.lm, body.memory or ""
    call.check_text(memory, body.prompt, longer=True)
    kept = encode_mixed(call, [memory], longer=True) if memory else []
    rest = lm.tokenizer.encode(body.prompt, specials=True) if memory else None
    if rest is None:
        ids = encode_mixed(call, [body.prompt], longer=True) if body.prompt else start_ids(call)
        # The BOS token stays when the beginning is cut off.
        num_kept = 1 if ids[0] == lm.tokenizer.bos_id else 0
        kept, rest = ids[:num_kept], ids[num_kept:]
    context = min(body.max_context_length or lm.context, lm.context)
    num_new = min(completion.max_tokens or 0, context // 2)
    room = max(1, context - num_new - len(kept))
    ids = lm.prompt_ids([*kept, *rest[-room:]])
    return ids, completion_options(call, completion, len(ids))


async def _complete(call: Call, body: KoboldRequest, texts: RequestTexts) -> dict[str, Any]:
    await texts.finish()
    text = texts.all[0]
    formats = LogprobFormat(call.served.lm.tokenizer)
    logprobs = None
    if body.num_logprobs:
        logprobs = {
            "content": [
                {"token": step.text, **_logprobs(step, body.num_logprobs, formats)}
                for step in text.generation.steps
                if step.text
            ]
        }
    return {
        "results": [
            {
                "text": text.generation.text,
                "finish_reason": _reason(text),
                "logprobs": logprobs,
                "prompt_tokens": len(text.generation.prompt),
                "completion_tokens": len(text.generation.steps),
            }
        ]
    }


def _chunk(step: Step, top: int, formats: LogprobFormat) -> bytes:
    if not step.text:
        return b""
    return _message({"token": step.text, "finish_reason": None, **_logprobs(step, top, formats)})


def _logprobs(step: Step, top: int, formats: LogprobFormat) -> dict[str, Any]:
    """The most likely tokens; the sampled one is among them, under the text that it added."""
    if not top:
        return {}
    best = {c.token: c.logprob for c in step.candidates[:top]} | {step.token: step.logprob}
    listed = [
        {"token": step.text if token == step.token else formats.text(token), "logprob": logprob}
        for token, logprob in sorted(best.items(), key=lambda item: -item[1])
        if logprob > float("-inf")
    ]
    return {"logprob": step.logprob, "top_logprobs": listed}


def _message(content: Any) -> bytes:
    return event(content, "message")


def _reason(text: RequestText) -> str:
    return finish_reason(text.generation.finish_reason)


# -- Texts in progress, by user and genkey: what they have so far, and how to stop them


Key = tuple[str, str]


def _running(request: Request) -> defaultdict[Key, list[RequestTexts]]:
    return state_of(request).extension(__name__, lambda: defaultdict(list))


def _key(request: Request, genkey: str | None) -> Key:
    return request.state.user, genkey or ""


def _forget(request: Request, genkey: str | None, texts: RequestTexts) -> None:
    running, key = _running(request), _key(request, genkey)
    running[key].remove(texts)
    if not running[key]:
        del running[key]


async def _texts_of(request: Request) -> list[RequestTexts]:
    """The running texts of the user with the key in the body, which clients may leave out."""
    body = await request.body()
    try:
        content = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        content = {}
    genkey = content.get("genkey") if isinstance(content, dict) else None
    key = _key(request, genkey if isinstance(genkey, str) else None)
    return list(_running(request).get(key, ()))


@router.get("/api/extra/generate/check", summary="The text generated so far")
@router.post("/api/extra/generate/check", include_in_schema=False)
async def kobold_check(request: Request) -> Response:
    texts = await _texts_of(request)
    pending = texts[-1].all[0].generation.text if texts and texts[-1].all else ""
    return JsonReply({"results": [{"text": pending}]})


@router.post("/api/extra/abort", summary="Stop your text, or the one of a genkey")
async def kobold_abort(request: Request) -> Response:
    texts = await _texts_of(request)
    for running in texts:
        running.close()
    return JsonReply({"success": "true" if texts else "false", "done": "true"})


# -- Information


class KoboldCountRequest(BaseModel):
    """A text to tokenize."""

    prompt: str = ""
    special: bool = Field(True, description="with the token at the beginning of a text")


@router.post("/api/extra/tokencount", summary="Tokenize a text")
async def kobold_tokencount(body: KoboldCountRequest, request: Request) -> Response:
    async with state_of(request).call(request, None, places=0) as call:
        call.check_text(body.prompt, longer=True)
        ids = await call.compute(_count, call, body)
    return JsonReply({"value": len(ids), "ids": ids})


def _count(call: Call, body: KoboldCountRequest) -> list[int]:
    """The tokens, with one at the beginning even if the model has no BOS token: clients drop it."""
    tokenizer = call.served.lm.tokenizer
    ids = tokenizer.encode(body.prompt, specials=True)
    first = start_ids(call)
    return [*first, *ids] if body.special and ids[:1] != first else ids


@router.get("/api/v1/model", summary="The name of the model")
@router.get("/api/latest/model", include_in_schema=False)
async def kobold_model(request: Request) -> Response:
    return JsonReply({"result": state_of(request).registry.first})


@router.get("/api/v1/info/version", summary="The version of KoboldAI's API")
@router.get("/api/latest/info/version", include_in_schema=False)
async def kobold_united_version() -> Response:
    return JsonReply({"result": UNITED_VERSION})


@router.get("/api/extra/version", summary="The version of KoboldCpp whose extensions these are")
async def kobold_version(request: Request) -> Response:
    content = {"result": "KoboldCpp", "version": CPP_VERSION, "protected": False,
               "txt2img": False, "vision": False, "transcribe": False}  # fmt: skip
    return JsonReply(content)


@router.get("/api/v1/config/max_context_length", summary="The length of the context")
@router.get("/api/latest/config/max_context_length", include_in_schema=False)
@router.get("/api/extra/true_max_context_length", summary="The length of the context")
async def kobold_context(request: Request) -> Response:
    async with state_of(request).call(request, None, places=0) as call:
        return JsonReply({"value": call.served.lm.context})


@router.get("/api/v1/config/max_length", summary="The most tokens of an answer")
@router.get("/api/latest/config/max_length", include_in_schema=False)
async def kobold_max_length(request: Request) -> Response:
    async with state_of(request).call(request, None, places=0) as call:
        limit = call.settings.max_tokens or call.served.lm.context
        return JsonReply({"value": min(limit, call.served.lm.context)})


@router.get("/api/v1/config/soft_prompt", include_in_schema=False)
async def kobold_soft_prompt() -> Response:
    return JsonReply({"value": ""})


@router.get("/api/v1/config/soft_prompts_list", include_in_schema=False)
async def kobold_soft_prompts() -> Response:
    return JsonReply({"values": []})
