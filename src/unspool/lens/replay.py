"""Write a saved generation again, and say where it first differs.

    result = replay(lm, load_trace("leaves.json"))
    result.exact                       # every token again, as likely as then
    print(result.describe())

With the same model every draw falls where it fell. What stood there before writing went on (words
that a person chose, or that were written with other settings) is not drawn but judged again: the
model must find each token as likely as it did then. The same goes for what cannot be asked for
again, such as a beam, or a text under a guard of the caller's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal

from unspool.engine.ending import Limits
from unspool.engine.generation import Generation
from unspool.engine.request import Request
from unspool.engine.steps import Step
from unspool.engine.thinking import CALL, Thinking
from unspool.errors import ContextError, SettingsError, UnspoolError, count
from unspool.lens.trace import Trace, fingerprint
from unspool.lens.weights import host
from unspool.sampling import Grammar, score
from unspool.sampling.guards import GuardPolicy
from unspool.session import Session

# A token's log-probability depends in its last bits on what else is in the batch.
_TOLERANCE = {"float32": 1e-3}
_TOLERANCE_16_BITS = 0.1
_JUDGED_AT_ONCE = 64  # tokens whose logits are in memory together

Kind = Literal["token", "bytes", "logprob", "end"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place at which the text, or what the model thought of it, is another."""

    kind: Kind  # another token; another text for it; another probability; another end
    index: int  # of the new tokens, from 0
    position: int  # in the whole text
    then: Step | None  # None: the text had ended
    now: Step | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        where = {"kind": self.kind, "index": self.index, "position": self.position}
        return where | {"then": _brief(self.then), "now": _brief(self.now)}

    def describe(self) -> str:
        """One sentence for people."""
        place = f"position {self.position} (new token {self.index + 1})"
        then, now = _described(self.then), _described(self.now)
        if self.kind == "token":
            return f"first differs at {place}: then {then}, now {now}"
        if self.kind == "bytes":
            return f"another vocabulary: at {place} the same token is {now}, and was {then}"
        if self.kind == "logprob":
            return f"the same tokens so far, but at {place} the model says {now}, and said {then}"
        return f"first differs in its end, at {place}: then {then}, now {now}"


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """How writing a trace again went."""

    generation: Generation  # as it was written now
    judged: int  # so many of its first tokens were taken as they stood, and judged
    difference: Difference | None
    largest: float  # how far log-probabilities were apart at the most, before any difference
    other_model: str | None  # in what the model is another one

    def __repr__(self) -> str:
        return f"<Replay: {self.describe()}>"

    @property
    def exact(self) -> bool:
        """Whether every token came again, as likely as then."""
        return self.difference is None

    def describe(self) -> str:
        """One or two sentences for people."""
        written = len(self.generation.steps) - self.judged
        if self.difference is not None:
            found = self.difference.describe()
        elif self.judged:
            found = (
                f"reproduced exactly: {count(self.judged, 'token')} judged as likely as then, "
                f"{written} written again"
            )
        else:
            found = f"reproduced exactly: {count(written, 'token')}"
        return f"{found}; the model is another: {self.other_model}" if self.other_model else found

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "exact": self.exact,
            "text": self.generation.text,
            "tokens": self.generation.tokens,
            "judged": self.judged,
            "difference": self.difference.to_dict() if self.difference else None,
            "largest_logprob_difference": self.largest,
            "other_model": self.other_model,
            "summary": self.describe(),
        }


def replay(
    lm: Session,
    trace: Trace,
    *,
    tolerance: float | None = None,
    guards: GuardPolicy | None = None,
) -> Replay:
    """Write a trace again and compare.

    `tolerance` is how far apart log-probabilities may be and still count as the same; by default
    1e-3, and 0.1 where weights are in 16 bits. `guards`: those that the text was written under, if
    they are a caller's own, which no file can hold; without them such a text is judged only.
    """
    if not isinstance(trace, Trace):
        raise SettingsError(f"trace must be a trace or the name of a file, got {trace!r}")
    _check_fits(lm, trace)
    known = _TOLERANCE.get(lm.model.precision, _TOLERANCE_16_BITS)
    limit = known if tolerance is None else tolerance
    guards = guards or trace.guards
    # Cut off under guards, nobody knows which words were about to be taken back.
    unclear = trace.guarded and (guards is None or not _ended(trace))
    given = len(trace.steps) if trace.limits is None or unclear else trace.given
    limits = trace.limits or Limits(max_tokens=len(trace.steps), context=lm.context)
    request = Request(
        prompt=trace.prompt,
        settings=trace.settings,
        limits=replace(
            limits,
            context=min(limits.context, lm.context),
            top=min(limits.top, lm.config.vocab_size),
        ),
        written=trace.steps[:given],
        grammar=Grammar.compile(trace.grammar, lm.grammar_vocabulary)
        if trace.grammar is not None and given < len(trace.steps)
        else None,
        guards=guards,
        thinking=_thinking(lm, trace),
    )
    judged = _judged(lm, trace, given)
    now = Generation(request, judged, empty_reason=trace.empty_reason, source=lm)
    if trace.limits is not None and given < len(trace.steps):
        _write(lm, now, None if _ended(trace) else len(trace.steps))
    difference, largest = _compare(trace.steps, now.steps, given, limit)
    return Replay(now, given, difference, largest, fingerprint(lm).differs_from(trace.model))


def _thinking(lm: Session, trace: Trace) -> Thinking | None:
    """Where the thoughts were, and how long they could be."""
    found = lm.thinking(trace.prompt) if trace.thoughts else None
    if found is None:
        return None
    return replace(found, budget=trace.think_budget, is_call=trace.thoughts == CALL)


def _ended(trace: Trace) -> bool:
    """Whether the text came to an end by itself, and was not cut off."""
    return bool(trace.steps) and trace.steps[-1].finish_reason is not None


def _check_fits(lm: Session, trace: Trace) -> None:
    """A trace may come from a larger model, or from nowhere: refuse what cannot be run."""
    endless = trace.limits is not None and trace.limits.endless is not None
    if len(trace.prompt) + len(trace.steps) > lm.context and not endless:
        raise ContextError(
            f"the trace has {len(trace.prompt) + len(trace.steps):,} tokens and the model's "
            f"context holds {lm.context:,}; replay it with the model that wrote it"
        )
    size = lm.config.vocab_size
    for token in (*trace.prompt, *trace.tokens, *trace.settings.logit_bias):
        if token >= size:
            raise UnspoolError(
                f"the trace names token {token}, and this model's vocabulary ends at {size - 1}; "
                "replay it with the model that wrote it"
            )


def _write(lm: Session, generation: Generation, most: int | None) -> None:
    """Let the generation be written; an interrupted one only as far as it came."""
    with lm.engine.submit(generation.request) as steps:
        for _ in generation.extend(steps):
            if most is not None and len(generation.steps) >= most:
                break


def _judged(lm: Session, trace: Trace, count: int) -> list[Step]:
    """The first steps as they stand, with what the model thinks of them now."""
    if not count:
        return []
    found: list[Step] = []
    tokens = trace.tokens
    with lm.opened(trace.prompt) as branch:
        logits = lm.engine.extend(branch, wanted=1)
        while True:
            start = len(found)
            steps = trace.steps[start : start + len(logits)]
            said = score(host(logits), [step.token for step in steps])
            for row, step in enumerate(steps):
                found.append(
                    replace(
                        step,
                        bytes=lm.engine.token_bytes(step.token),
                        logprob=float(said.logprobs[row]),
                        rank=int(said.ranks[row]),
                        entropy=max(0.0, float(said.entropies[row])),
                    )
                )
            if len(found) == count:
                return found
            # The logits of a token are about the next one.
            first = len(found) - 1
            added = tokens[first : min(first + _JUDGED_AT_ONCE, count - 1)]
            logits = lm.engine.extend(branch, added, wanted=len(added))


def _compare(
    then: Iterable[Step], now: Iterable[Step], given: int, limit: float
) -> tuple[Difference | None, float]:
    """The first difference, and how far log-probabilities were apart until there."""
    largest = 0.0
    for index, (one, two) in enumerate(zip_longest(then, now)):
        kind: Kind | None = None
        if one is None or two is None:
            kind = "end"
        elif one.token != two.token:
            kind = "token"
        elif one.bytes != two.bytes:
            kind = "bytes"
        else:
            apart = 0.0 if one.logprob == two.logprob else abs(one.logprob - two.logprob)
            if not apart <= limit:  # also when one of them is no number
                kind = "logprob"
            elif index >= given and one.finish_reason not in (None, two.finish_reason):
                kind = "end"
            else:
                largest = max(largest, apart)
        if kind is not None:
            return Difference(kind, index, (one or two).position, one, two), largest
    return None, largest


def _brief(step: Step | None) -> dict[str, Any] | None:
    if step is None:
        return None
    return {
        "token": step.token,
        "text": step.piece,
        "logprob": step.logprob if math.isfinite(step.logprob) else None,
        "finish_reason": step.finish_reason,
    }


def _described(step: Step | None) -> str:
    if step is None:
        return "nothing more"
    piece = repr(step.piece) if step.bytes else f"token {step.token}"
    ended = f", then the end ({step.finish_reason!r})" if step.finish_reason else ""
    return f"{piece} (log-probability {step.logprob:.4f}){ended}"
