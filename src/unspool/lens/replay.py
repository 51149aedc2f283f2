"""Generate a saved text again, and find the first difference.

    result = replay(lm, load_trace("leaves.json"))
    result.exact                       # the same tokens with the same probabilities
    print(result.describe())

With the same model every draw is the same. Tokens that were there before generation continued
(chosen by a person, or generated with other settings) are not sampled but scored again: each must
have the same probability as in the trace. So are texts that cannot be generated again, such as a
beam, or a text under a caller's guard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal

from unspool.backends.interventions import resolve
from unspool.engine.generation import Generation
from unspool.engine.reasoning import CALL, ReasoningSpec
from unspool.engine.request import Limits, Request
from unspool.engine.results import Step
from unspool.errors import ContextError, SettingsError, UnspoolError, count
from unspool.lens.activations import to_numpy
from unspool.lens.trace import Trace, fingerprint
from unspool.sampling import Grammar, score
from unspool.sampling.guards import GuardPolicy
from unspool.session import Session
from unspool.text.tokenizer.stream import TextStream

# The last bits of a log-probability depend on the batch.
_TOLERANCE = {"float32": 1e-3}
_TOLERANCE_16_BITS = 0.1
_SCORE_CHUNK = 64  # bounds the memory for logits

Kind = Literal["token", "bytes", "logprob", "end"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference in the text or in its probabilities."""

    kind: Kind  # what differs: token, its bytes, its probability, the end
    index: int  # in the generated tokens, from 0
    position: int  # in prompt and text
    then: Step | None  # in the trace; None: the text had ended
    now: Step | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        where = {"kind": self.kind, "index": self.index, "position": self.position}
        return where | {"then": _step_json(self.then), "now": _step_json(self.now)}

    def describe(self) -> str:
        """Describe the difference in one sentence."""
        place = f"position {self.position} (new token {self.index + 1})"
        then, now = _describe_step(self.then), _describe_step(self.now)
        if self.kind == "token":
            return f"first difference at {place}: then {then}, now {now}"
        if self.kind == "bytes":
            return f"different vocabulary: at {place} the same token is now {now}, was {then}"
        if self.kind == "logprob":
            return f"same tokens, but different probability at {place}: then {then}, now {now}"
        return f"different end at {place}: then {then}, now {now}"


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """Result of replaying a trace."""

    generation: Generation  # the new one
    num_scored: int  # number of first tokens that were scored, not generated
    difference: Difference | None  # the first one; None: all tokens are equal
    max_logprob_difference: float  # largest difference of log-probabilities before `difference`
    model_difference: str | None  # how the model differs; None: the same model

    def __repr__(self) -> str:
        return f"<Replay: {self.describe()}>"

    @property
    def exact(self) -> bool:
        """Whether all tokens and their probabilities were reproduced."""
        return self.difference is None

    def describe(self) -> str:
        """Describe the result in one or two sentences."""
        written = len(self.generation.steps) - self.num_scored
        if self.difference is not None:
            summary = self.difference.describe()
        elif self.num_scored:
            summary = (
                f"reproduced exactly: {count(self.num_scored, 'token')} scored with the same "
                f"probabilities, {written} generated again"
            )
        else:
            summary = f"reproduced exactly: {count(written, 'token')}"
        return (
            f"{summary}; different model: {self.model_difference}"
            if self.model_difference
            else summary
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "exact": self.exact,
            "text": self.generation.text,
            "tokens": self.generation.tokens,
            "judged": self.num_scored,
            "difference": self.difference.to_dict() if self.difference else None,
            "largest_logprob_difference": self.max_logprob_difference,
            "other_model": self.model_difference,
            "summary": self.describe(),
        }


def replay(
    lm: Session, trace: Trace, *, tolerance: float | None = None, guards: GuardPolicy | None = None
) -> Replay:
    """Generate a trace again and compare.

    Args:
        tolerance: difference of log-probabilities that counts as equal; default 1e-3, and 0.1 for
            weights in 16 bits.
        guards: guards of the text, if they include a caller's function, which a file cannot hold;
            without them such a text is only scored.
    """
    if not isinstance(trace, Trace):
        raise SettingsError(f"trace must be a Trace or a file name, got {trace!r}")
    _check_fits(lm, trace)
    default = _TOLERANCE.get(lm.model.precision, _TOLERANCE_16_BITS)
    limit = default if tolerance is None else tolerance
    guards = guards or trace.guards
    # If the text was cut off under guards, its last tokens might have been rewound.
    is_unclear = trace.guarded and (guards is None or not _ended(trace))
    num_given = len(trace.steps) if trace.limits is None or is_unclear else trace.given
    limits = trace.limits or Limits(max_tokens=len(trace.steps), context=lm.context)
    request = Request(
        prompt=trace.prompt,
        settings=trace.settings,
        limits=replace(
            limits,
            context=min(limits.context, lm.context),
            top=min(limits.top, lm.config.vocab_size),
        ),
        written=trace.steps[:num_given],
        grammar=Grammar.compile(trace.grammar, lm.grammar_vocabulary)
        if trace.grammar is not None and num_given < len(trace.steps)
        else None,
        guards=guards,
        thinking=_thinking(lm, trace),
        interventions=trace.interventions,
    )
    judged = _score_steps(lm, trace, num_given)
    now = Generation(request, judged, empty_reason=trace.empty_reason, source=lm)
    if trace.limits is not None and num_given < len(trace.steps):
        _generate(lm, now, None if _ended(trace) else len(trace.steps))
    difference, largest = _first_difference(trace.steps, now.steps, num_given, limit)
    return Replay(now, num_given, difference, largest, fingerprint(lm).differs_from(trace.model))


def generation_from(lm: Session, trace: Trace) -> Generation:
    """Return the text of a trace as one that the model can continue."""
    _check_fits(lm, trace)
    limits = trace.limits or Limits(max_tokens=len(trace.steps), context=lm.context)
    grammar = trace.grammar
    request = Request(
        prompt=trace.prompt,
        settings=trace.settings,
        limits=replace(limits, context=min(limits.context, lm.context)),
        grammar=None if grammar is None else Grammar.compile(grammar, lm.grammar_vocabulary),
        guards=trace.guards,
        thinking=_thinking(lm, trace),
        interventions=trace.interventions,
    )
    stream, steps = TextStream(), list[Step]()
    for step in trace.steps:  # files do not have what follows from the bytes
        steps.append(replace(step, partial_utf8=stream.partial_utf8))
        stream.push(step.bytes)
    if request.thinking is not None:
        steps = request.thinking.mark_steps(steps)
    difference = fingerprint(lm).differs_from(trace.model)
    notes = [] if difference is None else [f"written by another model: {difference}"]
    return Generation(request, steps, trace.empty_reason, lm, notes)


def _thinking(lm: Session, trace: Trace) -> ReasoningSpec | None:
    """Reasoning format and budget of the trace."""
    thinking = lm.thinking(trace.prompt) if trace.thoughts else None
    if thinking is None:
        return None
    return replace(thinking, budget=trace.think_budget, is_call=trace.thoughts == CALL)


def _ended(trace: Trace) -> bool:
    """Whether the text ended by itself and was not cut off."""
    return bool(trace.steps) and trace.steps[-1].finish_reason is not None


def _check_fits(lm: Session, trace: Trace) -> None:
    """Raise if this model cannot run the trace, e.g. that of a model with a larger vocabulary."""
    endless = trace.limits is not None and trace.limits.endless is not None
    if len(trace.prompt) + len(trace.steps) > lm.context and not endless:
        raise ContextError(
            f"the trace has {len(trace.prompt) + len(trace.steps):,} tokens, but the model's "
            f"context length is {lm.context:,}; replay it with the model that wrote it"
        )
    size = lm.config.vocab_size
    for token in (*trace.prompt, *trace.tokens, *trace.settings.logit_bias):
        if token >= size:
            raise UnspoolError(
                f"the trace has token {token}, but this model's vocabulary ends at {size - 1}; "
                "replay it with the model that wrote it"
            )
    lm.check_interventions(trace.interventions)


def _generate(lm: Session, generation: Generation, limit_tokens: int | None) -> None:
    """Run the generation, up to `limit_tokens` tokens if it was interrupted."""
    with lm.engine.submit(generation.request) as steps:
        for _ in generation.extend(steps):
            if limit_tokens is not None and len(generation.steps) >= limit_tokens:
                break


def _score_steps(lm: Session, trace: Trace, count: int) -> list[Step]:
    """The first steps of the trace with their probabilities now."""
    if not count:
        return []
    scored: list[Step] = []
    tokens = trace.tokens
    interventions = resolve(trace.interventions, len(trace.prompt))
    with lm.open_branch(trace.prompt, interventions=interventions) as branch:
        logits = lm.engine.extend(branch, num_logits=1)
        while True:
            start = len(scored)
            steps = trace.steps[start : start + len(logits)]
            scores = score(to_numpy(logits), [step.token for step in steps])
            for row, step in enumerate(steps):
                scored.append(
                    replace(
                        step,
                        bytes=lm.engine.token_bytes(step.token),
                        logprob=float(scores.logprobs[row]),
                        rank=int(scores.ranks[row]),
                        entropy=max(0.0, float(scores.entropies[row])),
                    )
                )
            if len(scored) == count:
                return scored
            # The logits after a token predict the next one.
            first = len(scored) - 1
            new_tokens = tokens[first : min(first + _SCORE_CHUNK, count - 1)]
            logits = lm.engine.extend(branch, new_tokens, num_logits=len(new_tokens))


def _first_difference(
    then: Iterable[Step], now: Iterable[Step], num_given: int, limit: float
) -> tuple[Difference | None, float]:
    """First difference, and the largest difference of log-probabilities before it."""
    largest = 0.0
    for index, (old, new) in enumerate(zip_longest(then, now)):
        kind: Kind | None = None
        if old is None or new is None:
            kind = "end"
        elif old.token != new.token:
            kind = "token"
        elif old.bytes != new.bytes:
            kind = "bytes"
        else:
            distance = 0.0 if old.logprob == new.logprob else abs(old.logprob - new.logprob)
            if not distance <= limit:  # also if NaN
                kind = "logprob"
            elif index >= num_given and old.finish_reason not in (None, new.finish_reason):
                kind = "end"
            else:
                largest = max(largest, distance)
        if kind is not None:
            return Difference(kind, index, (old or new).position, old, new), largest
    return None, largest


def _step_json(step: Step | None) -> dict[str, Any] | None:
    if step is None:
        return None
    return {
        "token": step.token,
        "text": step.piece,
        "logprob": step.logprob if math.isfinite(step.logprob) else None,
        "finish_reason": step.finish_reason,
    }


def _describe_step(step: Step | None) -> str:
    if step is None:
        return "end of text"
    piece = repr(step.piece) if step.bytes else f"token {step.token}"
    end = f", then the end ({step.finish_reason!r})" if step.finish_reason else ""
    return f"{piece} (log-probability {step.logprob:.4f}){end}"
