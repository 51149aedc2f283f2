"""llama.cpp's own endpoints: `POST /completion`, `/props`, `/slots` and `/lora-adapters`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from unspool import __version__
from unspool.engine.generation import Generation
from unspool.engine.steps import Step
from unspool.sampling.settings import SamplingSettings
from unspool.serve.core.foreign import sampler_names
from unspool.serve.core.options import check_choices, compile_schema, sampling_options
from unspool.serve.core.schema import LoraScale
from unspool.serve.core.state import Call, state_of
from unspool.serve.core.step_json import progress_json, timings_json
from unspool.serve.core.texts import RequestText, RequestTexts
from unspool.serve.http.errors import ApiError
from unspool.serve.http.events import event
from unspool.serve.http.routes import JsonReply, new_router
from unspool.serve.http.wire import Wire
from unspool.serve.llamacpp.schema import LlamaCompletionRequest
from unspool.serve.openai.completions import start_ids
from unspool.serve.openai.logprobs import LogprobFormat, clamp_logprob

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
@router.post("/slots/{slot}", include_in_schema=False)
async def read_only() -> Response:
    message = (
        "this is read-only: settings are part of each request, prefixes are cached automatically"
    )
    raise ApiError(501, message, code="not_implemented")
