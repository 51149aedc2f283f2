"""llama.cpp's own endpoints: `POST /completion`, and `/props` and `/slots` to be read.

An adapter over the same core as `/v1/completions`. The settings' defaults are llama.cpp's anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from unspool import __version__
from unspool.engine.generation import Generation
from unspool.engine.steps import Step
from unspool.sampling.settings import SamplingSettings
from unspool.serve.core.options import check_choices, read_schema, sampling_options
from unspool.serve.core.state import Call, state_of
from unspool.serve.core.texts import Text, Texts
from unspool.serve.http.errors import ApiError
from unspool.serve.http.events import event
from unspool.serve.http.routes import JsonReply, new_router
from unspool.serve.http.wire import Wire
from unspool.serve.llamacpp.schema import CompletionRequest
from unspool.serve.openai.completions import start_ids
from unspool.serve.openai.logprobs import LogprobFormat, finite

router = new_router("llama.cpp")


@router.post("/completion", summary="Continue a text")
@router.post("/completions", include_in_schema=False)
async def completion(body: CompletionRequest, request: Request) -> Response:
    state = state_of(request)
    n = body.n or 1
    check_choices(n, state.settings.max_choices)
    many = body.prompts
    call = await state.enter(request, body.model, n)
    prompts, options = await call.thread(_prepare, call, body, many)
    answer = CompletionAnswer(call, body, await call.write(prompts, options, n))
    if body.stream:
        return call.stream(answer.write, lambda error: event(error.llamacpp()))
    return await call.reply(answer.whole())


def _prepare(
    call: Call, body: CompletionRequest, many: list[str | list[int | str]]
) -> tuple[list[list[int]], dict[str, Any]]:
    call.heed(body)
    parts = [[text] if isinstance(text, str) else text for text in many]
    prompts = [_ids(call, one, body.is_endless) for one in parts]
    options = sampling_options(call.served.lm, body, top=body.n_probs)
    if body.n_probs and body.post_sampling_probs:
        options["explain"] = True
    read_schema(call, options)
    options["max_tokens"] = call.token_limit(body.max_tokens, max(map(len, prompts)))
    return prompts, options


def _ids(call: Call, parts: Sequence[int | str], longer: bool) -> list[int]:
    """Words and ids in a row as ids; words at the beginning begin as every prompt does."""
    lm = call.served.lm
    call.check_text(*(part for part in parts if isinstance(part, str)), longer=longer)
    ids: list[int] = []
    for number, part in enumerate(parts):
        if isinstance(part, int):
            ids.append(part)
        else:
            ids += (
                lm.tokenizer.encode(part, specials=True)
                if number
                else lm.prompt_ids(part, longer=longer)
            )
    return lm.prompt_ids(ids or start_ids(call), longer=longer)


class CompletionAnswer:
    """What is answered, whole or in chunks."""

    def __init__(self, call: Call, body: CompletionRequest, texts: Texts) -> None:
        self.call, self.body, self.texts = call, body, texts
        self.tokens = LogprobFormat(call.served.lm.tokenizer)

    async def whole(self) -> Any:
        await self.texts.finish()
        found = [self._final(number) for number in range(len(self.texts.all))]
        return found[0] if len(found) == 1 else found

    async def write(self, wire: Wire) -> None:
        counts: Counter[int] = Counter()

        def take(steps: list[tuple[int, Step]]) -> None:
            chunks = []
            for number, step in steps:
                counts[number] += 1
                chunks.append(event(self._chunk(number, step, counts[number])))
            wire.put(b"".join(chunks))

        await self.texts.deliver_final(take, wire)
        for number in range(len(self.texts.all)):
            last = self._final(number) | {"content": "", "tokens": []}
            last.pop("completion_probabilities", None)  # each was told with its token
            wire.put(event(last))

    def _chunk(self, number: int, step: Step, count: int) -> dict[str, Any]:
        prompt = self.texts.prompts[number // self.texts.n]
        found = {"index": number, "content": step.text, "tokens": [step.token], "stop": False,
                 "id_slot": -1, "tokens_predicted": count,
                 "tokens_evaluated": len(prompt)}  # fmt: skip
        return found | self._probabilities([step])

    def _final(self, number: int) -> dict[str, Any]:
        text = self.texts.all[number]
        generation, lm = text.generation, self.call.served.lm
        found = {
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
            "truncated": generation.finish_reason == "context" or _has_forgotten(generation),
            **_ending(text),
            "tokens_cached": text.reused,
            "timings": _timings(text),
            **self._probabilities(generation.steps),
        }
        return _chosen(found, self.body.response_fields)

    def _settings(self, text: Text) -> dict[str, Any]:
        limits = text.generation.request.limits
        return {
            **settings_json(text.generation.settings),
            "n_ctx": self.call.served.lm.context,
            "n_predict": limits.max_tokens,
            "max_tokens": limits.max_tokens,
            "stop": list(limits.stop),
            "ignore_eos": not limits.end_ids,
            "stream": bool(self.body.stream),
            "n_probs": self.body.n_probs,
            "post_sampling_probs": self.body.post_sampling_probs,
        }

    def _probabilities(self, steps: list[Step]) -> dict[str, Any]:
        if not self.body.n_probs:
            return {}
        return {"completion_probabilities": [self._probability(step) for step in steps]}

    def _probability(self, step: Step) -> dict[str, Any]:
        """The model's own log-probabilities, or what was left when the token was drawn."""
        best = step.candidates[: self.body.n_probs]
        if self.body.post_sampling_probs:
            top = [{**self._token(c.token), "prob": c.probability} for c in best if c.probability]
            return {**self._token(step.token), "prob": step.probability, "top_probs": top}
        told = [{**self._token(c.token), "logprob": finite(c.logprob)} for c in best]
        return {**self._token(step.token), "logprob": finite(step.logprob), "top_logprobs": told}

    def _token(self, token: int) -> dict[str, Any]:
        return {
            "id": token,
            "token": self.tokens.bytes(token).decode("utf-8", "replace"),
            "bytes": list(self.tokens.bytes(token)),
        }


def _ending(text: Text) -> dict[str, Any]:
    by = text.stream.stopped_by
    reason = text.generation.finish_reason
    kind = "word" if by is not None else "eos" if reason == "stop" else "limit"
    return {"stop_type": kind, "stopping_word": by or ""}


def _has_forgotten(generation: Generation) -> bool:
    """Whether the text outgrew the context, and went on without its oldest tokens."""
    length = len(generation.prompt) + len(generation.steps)
    return generation.request.limits.forgotten(length) > 0


def _timings(text: Text) -> dict[str, Any]:
    seconds = [step.seconds for step in text.generation.steps]
    read = len(text.generation.prompt) - text.reused
    return {
        "cache_n": text.reused,
        **_pace("prompt", read, sum(seconds[:1])),
        **_pace("predicted", len(seconds), sum(seconds[1:])),
    }


def _pace(name: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": count,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / max(1, count),
        f"{name}_per_second": count / seconds if seconds > 0 else 0.0,
    }


def _chosen(found: dict[str, Any], fields: list[str] | None) -> dict[str, Any]:
    """Only these, where a request names them; `a/b` is what stands under b in a."""
    if not fields:
        return found
    chosen = {}
    for field in fields:
        value: Any = found
        for part in field.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            chosen[field.rpartition("/")[2]] = value
    return chosen


def settings_json(settings: SamplingSettings) -> dict[str, Any]:
    """Sampling settings by llama.cpp's names."""
    names = ("seed", "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p",
             "min_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "typical_p",
             "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base",
             "dry_allowed_length", "mirostat_tau", "mirostat_eta")  # fmt: skip
    return {
        **{name: getattr(settings, name) for name in names},
        "repeat_penalty": settings.repetition_penalty,
        "repeat_last_n": settings.penalty_window,
        "dry_penalty_last_n": settings.dry_window,
        "mirostat": 2 if settings.mirostat_tau else 0,
        "samplers": list(settings.stages),
    }


# -- to be read ------------------------------------------------------------------------------


@router.get("/props", summary="The model, and the settings that hold unless told")
async def props(request: Request, model: str | None = None) -> Response:
    state = state_of(request)
    async with state.call(request, model, places=0) as call:
        lm = call.served.lm
        tokenizer = lm.tokenizer
        first, last = (
            "" if token is None else tokenizer.token_text(token)
            for token in (tokenizer.bos_id, tokenizer.eos_id)
        )
        usual = {**settings_json(SamplingSettings()), "n_predict": -1, "seed": -1}
        slot = {"id": 0, "id_task": -1, "n_ctx": lm.context, "is_processing": False,
                "speculative": False, "params": usual}  # fmt: skip
        found = {
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
    return JsonReply(found)


@router.get("/slots", summary="Places for texts, and which are taken")
async def slots(request: Request, fail_on_no_slot: str | None = None) -> Response:
    state = state_of(request)
    total, taken = state.settings.max_running, state.admission.running
    if fail_on_no_slot and taken >= total:
        raise ApiError(503, "no slot available", code="queue_full", retry_after=1)
    loaded = state.registry.loaded.get(state.registry.first)
    context = 0 if loaded is None else loaded.lm.context
    found = [
        {"id": i, "id_task": -1, "n_ctx": context, "speculative": False, "is_processing": i < taken}
        for i in range(total)
    ]
    return JsonReply(found)


@router.post("/props", include_in_schema=False)
@router.post("/slots/{slot}", include_in_schema=False)
async def read_only() -> Response:
    message = "this can only be read: settings are given with each request, and prefixes are kept"
    raise ApiError(501, f"{message} by themselves", code="not_implemented")
