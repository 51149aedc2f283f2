"""Steps, timings and traces of texts as JSON: the parts under `unspool` and `timings`."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import Any

from unspool.engine.results import Candidate, Step
from unspool.sampling.chain import StageReport
from unspool.server.runtime.texts import RequestText, RequestTexts

Readable = Callable[[int, bytes], str]  # text of a token after an incomplete UTF-8 character


def texts_json(texts: RequestTexts, trace: bool) -> dict[str, Any]:
    """For each choice: the seed and sample that reproduce it, its log-probability and notes."""
    readable = texts.served.lm.readable
    return {"choices": [_choice(text, trace, readable) for text in texts.all]}


def _choice(text: RequestText, trace: bool, readable: Readable) -> dict[str, Any]:
    generation = text.generation
    choice: dict[str, Any] = {
        "seed": generation.seed,
        "sample": generation.request.limits.sample,
        "logprob": finite(generation.logprob),
        "finish_reason": generation.finish_reason,
        "stopped_by": text.stream.stopped_by,
        "notes": list(text.stream.notes),
    }
    if trace:
        prompt = len(generation.prompt)
        choice["steps"] = [step_json(step, prompt, readable) for step in generation.steps]
    return choice


def step_json(step: Step, prompt: int, readable: Readable) -> dict[str, Any]:
    """A full step: candidate tokens, what each sampling stage did, and which one was sampled.

    As `Step.to_dict`, with its index after the `prompt` tokens of the prompt, and with readable
    tokens. `piece` is the token alone; `text` is the text that became complete with it.
    """
    partial_utf8 = step.partial_utf8
    return {
        "index": step.position - prompt,
        "position": step.position,
        "token": step.token,
        "piece": readable(step.token, partial_utf8),
        "text": step.text,
        "bytes": list(step.bytes),
        "logprob": finite(step.logprob),
        "rank": step.rank,
        "entropy": None if step.entropy is None else finite(step.entropy),
        "probability": step.probability,
        "draw": None
        if step.draw is None
        else {"u": step.draw.u, "low": step.draw.low, "high": step.draw.high},
        "candidates": [
            _candidate(candidate, readable, partial_utf8) for candidate in step.candidates
        ],
        "stages": [_stage(stage, readable, partial_utf8) for stage in step.stages],
        "seconds": step.seconds,
        "finish_reason": step.finish_reason,
        "draft": step.draft,
        "retracts": step.retracts,
        "chosen": step.chosen,
        **({"thought": True} if step.thought else {}),
    }


def _candidate(candidate: Candidate, readable: Readable, partial_utf8: bytes) -> dict[str, Any]:
    return {
        "token": candidate.token,
        "text": readable(candidate.token, partial_utf8),
        "logprob": finite(candidate.logprob),
        "probability": candidate.probability,
    }


def _stage(stage: StageReport, readable: Readable, partial_utf8: bytes) -> dict[str, Any]:
    return {
        "name": stage.name,
        "kept": stage.kept,
        "removed": stage.removed,
        "kept_mass": stage.kept_mass,
        "changed": stage.changed,
        "top": [[token, chance, readable(token, partial_utf8)] for token, chance in stage.top],
    }


def timings_json(text: RequestText) -> dict[str, Any]:
    """Prompt and decode speed of a text, as llama.cpp reports them.

    The first token is part of the prompt's time, so the decode rate is that of the others.
    """
    num_read = len(text.generation.prompt) - text.reused
    num_written = len(text.generation.steps)
    num_later = max(0, num_written - 1)
    timings: dict[str, Any] = {
        "cache_n": text.reused,
        "prompt_n": num_read,
        "prompt_ms": 1000 * text.prompt_s,
        "prompt_per_token_ms": 1000 * text.prompt_s / max(1, num_read),
        "prompt_per_second": num_read / text.prompt_s if text.prompt_s > 0 else 0.0,
        "predicted_n": num_written,
        "predicted_ms": 1000 * text.later_s,
        "predicted_per_token_ms": 1000 * text.later_s / max(1, num_later),
        "predicted_per_second": num_later / text.later_s if text.later_s > 0 else 0.0,
    }
    if text.stream.drafted:
        timings |= {"draft_n": text.stream.drafted, "draft_n_accepted": text.stream.accepted}
    return timings


def progress_json(text: RequestText, computed: int, *, timed: bool) -> dict[str, Any]:
    """Prompt progress, as llama.cpp reports it; with timings if `timed`."""
    seconds = 0.0 if computed <= text.reused else perf_counter() - text.progress_since
    progress: dict[str, Any] = {
        "prompt_progress": {
            "total": len(text.generation.prompt),
            "cache": text.reused,
            "processed": computed,
            "time_ms": round(1000 * seconds),
        }
    }
    if timed:
        num_read = computed - text.reused
        progress["timings"] = timings_json(text) | {
            "prompt_n": num_read,
            "prompt_ms": 1000 * seconds,
            "prompt_per_token_ms": 1000 * seconds / max(1, num_read),
            "prompt_per_second": num_read / seconds if seconds > 0 else 0.0,
        }
    return progress


def finite(number: float) -> float | None:
    """The number, or None if it is infinite or NaN, which JSON has not."""
    return number if math.isfinite(number) else None
