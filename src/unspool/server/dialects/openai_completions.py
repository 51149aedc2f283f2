"""`POST /v1/completions`: OpenAI's older completions endpoint.

`echo` with `logprobs` also returns the log-probabilities of the prompt; evaluation harnesses score
answers with it.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request
from pydantic import Field, StrictBool
from starlette.responses import Response

from unspool.decoding.branches import mean_logprob
from unspool.engine.generation import Generation
from unspool.engine.results import Score, Step
from unspool.server.dialects.answers import Answer, join_logprobs
from unspool.server.http.errors import bad_request
from unspool.server.http.events import EventTemplate, Wire
from unspool.server.http.replies import new_router
from unspool.server.runtime.schema import (
    Prompts,
    SamplingRequest,
    as_list,
    check_choices,
    check_stream_options,
    compile_schema,
    finish_reason,
    sampling_options,
)
from unspool.server.runtime.state import Call, state_of
from unspool.server.runtime.texts import InfillGap, RequestTexts

router = new_router("OpenAI")
DEFAULT_TOKENS = 16  # as in OpenAI's API


class CompletionRequest(SamplingRequest):
    """Prompts to complete."""

    prompt: Prompts
    suffix: str | None = Field(None, description="text after the completion (infill)")
    best_of: int | None = Field(None, ge=1)
    echo: bool | None = None
    max_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    logprobs: int | None = Field(None, ge=0, le=20)
    parse_special: StrictBool = Field(
        True, description="parse control tokens in the prompt; false: they are text"
    )
    return_token_ids: StrictBool | None = Field(
        None, description="vLLM's: token ids of each choice, and of its prompt"
    )


@router.post("/v1/completions", summary="Continue a text")
async def completions(body: CompletionRequest, request: Request) -> Response:
    state = state_of(request)
    n = body.n or 1
    num_texts = max(n, body.best_of or 0)
    check_choices(num_texts, state.settings.max_choices, "n" if n == num_texts else "best_of")
    _check(body, n)
    call = await state.enter(request, state.adapted_model(body.model, body.lora), num_texts)
    ids, gaps, options = await call.compute(_prepare, call, body)
    texts = await call.write(ids, options, num_texts, start=not _is_scored(body), gaps=gaps)
    answer = _Completion(call, body, texts, n)
    return call.stream(answer.write) if body.stream else await call.reply(answer.answer())


def _check(body: CompletionRequest, n: int) -> None:
    if body.best_of is not None and body.best_of < n:
        raise bad_request(f"best_of must be at least n, got {body.best_of} and n {n}", "best_of")
    if body.best_of is not None and body.best_of > n and body.stream:
        raise bad_request(
            "best_of cannot be streamed: the best is known at the end only", "best_of"
        )
    if body.suffix and body.echo:
        raise bad_request("echo and suffix cannot be combined; omit one", "echo")
    check_stream_options(body)
    has_return = body.unspool is not None and body.unspool.return_ is not None
    if body.max_tokens == 0 and not (body.echo or has_return):
        raise bad_request("max_tokens is 0 without echo: there is nothing to return", "max_tokens")


def _prepare(
    call: Call, body: CompletionRequest
) -> tuple[list[list[int]], list[InfillGap] | None, dict[str, Any]]:
    lm, texts = call.served.lm, as_list(body.prompt)
    for text in texts:
        words = text if isinstance(text, str) else ""
        call.check_text(words, body.suffix or "", longer=body.is_endless)
    # The empty prompt of a model with a BOS token is that token.
    prompts = [
        lm.prompt_ids(
            text or start_ids(call), longer=body.is_endless, parse_special=body.parse_special
        )
        for text in texts
    ]
    gaps = None
    if body.suffix:
        before = [text if isinstance(text, str) else lm.tokenizer.decode(text) for text in texts]
        gaps = [InfillGap(text, body.suffix) for text in before]
        prompts = [gap.prompt(lm) for gap in gaps]
    call.apply_hints(body)
    options = sampling_options(lm, body, top=body.logprobs or 0)
    compile_schema(options, call.note)
    longest = max(map(len, prompts))
    options["max_tokens"] = call.token_limit(body.max_tokens, longest, default=DEFAULT_TOKENS)
    return prompts, gaps, options


def start_ids(call: Call) -> list[int]:
    """An empty prompt: the BOS token, or EOS."""
    tokenizer = call.served.lm.tokenizer
    first = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    if first is None:
        raise bad_request("the prompt is empty; this model needs at least one token", "prompt")
    return [first]


def _is_scored(body: CompletionRequest) -> bool:
    """Whether the log-probabilities of the prompts are requested too."""
    return bool(body.echo) and body.logprobs is not None


class _Completion(Answer):
    """A completion, complete or in chunks."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"

    def __init__(self, call: Call, body: CompletionRequest, texts: RequestTexts, n: int) -> None:
        super().__init__(call, texts, body.unspool, body.stream_options)
        self.body, self.n, self.scores = body, n, list[Score]()
        self.timed, self.verbose = bool(body.timings_per_token), bool(body.verbose)
        self.offsets: dict[int, int] = {}
        self._words = EventTemplate(lambda number, text: self._chunk(_choice(number, text)))

    async def _score(self) -> None:
        """Score the prompts first, if requested: the texts reuse their KV cache."""
        if _is_scored(self.body):
            score, top = self.served.lm.score, self.body.logprobs or 0
            self.scores = await self.call.compute_all(score, self.texts.prompts, top=top)
            await self.texts.start()

    def _echo(self, prompt: int) -> str:
        return self.served.lm.tokenizer.decode(self.texts.prompts[prompt]) if self.body.echo else ""

    async def answer(self) -> dict[str, Any]:
        await self._score()
        await self.texts.finish()
        choices = []
        for prompt in range(len(self.texts.prompts)):
            texts = [self.texts.texts[prompt * self.texts.n + i] for i in range(self.texts.n)]
            ranked = [text.generation for text in texts]
            if self.texts.n > self.n:
                ranked = sorted(ranked, key=mean_logprob, reverse=True)[: self.n]
            choices += [self._complete_choice(prompt, generation) for generation in ranked]
        return self._complete_json([{**choice, "index": i} for i, choice in enumerate(choices)])

    def _complete_choice(self, prompt: int, generation: Generation) -> dict[str, Any]:
        logprobs = None
        if self.body.logprobs is not None:
            echoed, offset = self._echoed(prompt)
            generated = self.logprob_format.completion(generation.steps, self.body.logprobs, offset)
            logprobs = join_logprobs(echoed, generated) if echoed else generated
        text, reason = self._echo(prompt) + generation.text, generation.finish_reason
        choice = _choice(0, text, logprobs, finish_reason(reason))
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = list(generation.prompt)
            choice["token_ids"] = generation.tokens
        return choice

    def _echoed(self, prompt: int) -> tuple[dict[str, Any] | None, int]:
        if not self.scores:
            return None, 0
        return self.logprob_format.echoed(self.scores[prompt], self.body.logprobs or 0)

    async def write(self, wire: Wire) -> None:
        if self.body.return_progress:
            self._watch_progress(wire)
        await self._score()
        if self.body.echo:
            for number in range(len(self.texts.prompts) * self.texts.n):
                echoed, offset = self._echoed(number // self.texts.n)
                self.offsets[number] = offset
                wire.write(self._chunk(_choice(number, self._echo(number // self.texts.n), echoed)))
        await self.texts.deliver_final(
            lambda steps: wire.write(b"".join([self._event(*item) for item in steps])),
            wire,
            live=self.trace,
        )
        for number, text in self.texts.texts.items():
            if not text.generation.steps:
                reason = finish_reason(text.generation.finish_reason)
                wire.write(self._chunk(_choice(number, "", None, reason)))
        wire.write(self._last_events())

    def _event(self, number: int, step: Step) -> bytes:
        logprobs = None
        if self.body.logprobs is not None:
            offset = self.offsets.get(number, 0)
            logprobs = self.logprob_format.completion([step], self.body.logprobs, offset)
            self.offsets[number] = offset + len(step.text)
        reason = finish_reason(step.finish_reason) if step.finish_reason else None
        traced_step = step if self.trace or step.retracts else None
        has_ids = bool(self.body.return_token_ids)
        if not (logprobs or reason or traced_step or has_ids or (self.timed and step.text)):
            return self._words(number, step.text) if step.text else b""
        choice = _choice(number, step.text, logprobs, reason)
        if has_ids:
            choice["token_ids"] = [step.token]
        return self._chunk(choice, traced_step)


def _choice(
    number: int, text: str, logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}
