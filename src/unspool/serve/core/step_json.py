"""What is told of a text beyond its words: steps, and under `unspool` how an answer came about."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from unspool.engine.steps import Candidate, Step
from unspool.sampling.records import StageReport
from unspool.serve.core.texts import Text, Texts

Readable = Callable[[int, bytes], str]  # a token, and what of a character stands before it


def texts_json(texts: Texts, trace: bool) -> dict[str, Any]:
    """Of each choice: the seed and the sample number that bring it back, and how it went."""
    readable = texts.served.lm.readable
    return {"choices": [_choice(text, trace, readable) for text in texts.all]}


def _choice(text: Text, trace: bool, readable: Readable) -> dict[str, Any]:
    generation = text.generation
    found: dict[str, Any] = {
        "seed": generation.seed,
        "sample": generation.request.limits.sample,
        "logprob": finite(generation.logprob),
        "finish_reason": generation.finish_reason,
        "stopped_by": text.stream.stopped_by,
        "notes": list(text.stream.notes),
    }
    if trace:
        prompt = len(generation.prompt)
        found["steps"] = [step_json(step, prompt, readable) for step in generation.steps]
    return found


def step_json(step: Step, prompt: int, readable: Readable) -> dict[str, Any]:
    """A step in full: what was weighed, what each stage did, where the draw fell.

    As `Step.to_dict`, with its number behind the `prompt` tokens of the prompt, and with every
    token readable. `piece` is the token alone; `text` what could be shown once it was there.
    """
    begun = step.begun
    return {
        "index": step.position - prompt,
        "position": step.position,
        "token": step.token,
        "piece": readable(step.token, begun),
        "text": step.text,
        "bytes": list(step.bytes),
        "logprob": finite(step.logprob),
        "rank": step.rank,
        "entropy": None if step.entropy is None else finite(step.entropy),
        "probability": step.probability,
        "draw": None
        if step.draw is None
        else {"u": step.draw.u, "low": step.draw.low, "high": step.draw.high},
        "candidates": [_candidate(candidate, readable, begun) for candidate in step.candidates],
        "stages": [_stage(stage, readable, begun) for stage in step.stages],
        "seconds": step.seconds,
        "finish_reason": step.finish_reason,
        "draft": step.draft,
        "retracts": step.retracts,
        "chosen": step.chosen,
        **({"thought": True} if step.thought else {}),
    }


def _candidate(candidate: Candidate, readable: Readable, begun: bytes) -> dict[str, Any]:
    return {
        "token": candidate.token,
        "text": readable(candidate.token, begun),
        "logprob": finite(candidate.logprob),
        "probability": candidate.probability,
    }


def _stage(stage: StageReport, readable: Readable, begun: bytes) -> dict[str, Any]:
    return {
        "name": stage.name,
        "kept": stage.kept,
        "removed": stage.removed,
        "kept_mass": stage.kept_mass,
        "changed": stage.changed,
        "top": [[token, chance, readable(token, begun)] for token, chance in stage.top],
    }


def finite(number: float) -> float | None:
    """JSON has no infinity: the logarithm of nothing is null."""
    return number if math.isfinite(number) else None
