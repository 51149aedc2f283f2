"""What an answer tells under the key `unspool`, when the request had one."""

from __future__ import annotations

from typing import Any

from unspool.engine.steps import Step
from unspool.serve.texts import Text, Texts


def told(texts: Texts, trace: bool) -> dict[str, Any]:
    """Of each choice: the seed and the sample number that bring it back, and how it went."""
    return {"choices": [_choice(text, trace) for text in texts.all]}


def _choice(text: Text, trace: bool) -> dict[str, Any]:
    generation = text.generation
    found: dict[str, Any] = {
        "seed": generation.seed,
        "sample": generation.request.limits.sample,
        "logprob": generation.logprob,
        "finish_reason": generation.finish_reason,
        "stopped_by": text.stream.stopped_by,
        "notes": list(text.stream.notes),
    }
    if trace:
        found["steps"] = [told_step(step) for step in generation.steps]
    return found


def told_step(step: Step) -> dict[str, Any]:
    """One step, in full: what was weighed, what each stage did, where the draw fell."""
    return step.to_dict()
