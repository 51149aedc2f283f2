"""Draft candidates for a gap with a causal model.

Half of them continue the prefix alone. For the other half the model first reads the whole text with
___ in the gap and then the prefix again, so it knows the suffix. Ranking is done elsewhere.

The likeliest first tokens are found (with token healing, see `borders.py`), and the best of them
are continued in parallel, one branch each. A draft may be cut wherever the suffix could start:
after each of its tokens, and where its text reaches the suffix's own words. The probability of the
suffix's first token decides which cuts are worth scoring in full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice, zip_longest

import numpy as np

from unspool.backends.step import Logits
from unspool.decoding.fill.borders import continuations, first_token, text_ids
from unspool.decoding.fill.gaps import Gap
from unspool.decoding.written import HeldBranches
from unspool.engine.branch import Branch
from unspool.engine.picking import concat_logits
from unspool.sampling import Chain, RowInput, SamplingSettings
from unspool.sampling.operations import array_operations
from unspool.sampling.scoring import Floats, log_softmax
from unspool.session import Session

_KEY_CHARS = 12  # of the suffix, searched for in drafts
_EXTRA_TOKENS = 2  # drafted beyond the gap: tokenized again, the text may have fewer
_REPEATED_CHARS = 240  # of the prefix, repeated after the whole text


@dataclass(frozen=True, slots=True)
class Drafting:
    """Settings for drafting candidates."""

    settings: SamplingSettings
    singles: int = 64  # first tokens considered
    drafts: int = 6  # of them that are continued
    candidates: int = 20  # cuts to score in full
    stop: tuple[str, ...] = ()  # strings that end a draft


@dataclass(frozen=True, slots=True)
class _GapDraft:
    """A partial draft."""

    branch: Branch
    history: tuple[int, ...]  # all tokens; the last is not computed yet
    inside: bytes  # text in the gap so far
    logprob: float


def drafted(
    lm: Session, prefix: str, suffix: str, gap: Gap, how: Drafting, fits: Callable[[str], bool]
) -> list[str]:
    """Texts that fit the gap, most promising first."""
    sources = [_draft_cuts(lm, prefix, suffix, gap, how)]
    if suffix.strip():
        second_settings = replace(how, singles=how.candidates)
        sources.append(
            _draft_cuts(lm, f"{prefix}___{suffix}\n{_tail(prefix)}", suffix, gap, second_settings)
        )
    alternating = dict.fromkeys(
        text for pair in zip_longest(*sources) for text in pair if text is not None
    )
    return list(islice(filter(fits, alternating), how.candidates))


def _tail(text: str) -> str:
    """The end of a text, starting at a word."""
    return text if len(text) <= _REPEATED_CHARS else text[-_REPEATED_CHARS:].partition(" ")[2]


def _draft_cuts(lm: Session, prefix: str, suffix: str, gap: Gap, how: Drafting) -> list[str]:
    """Texts that could stand between prefix and suffix, most promising first."""
    cuts = _GapCandidates(lm, suffix, how.stop)
    ids = tuple(text_ids(lm, prefix))
    with HeldBranches(lm.engine, lm.adapter) as tracker:
        # Two branches before the gap: with the last token, and without it for token healing.
        full, before = tracker.open(ids[:-1] or ids), None
        base, behind = full, _log_softmax(lm.engine.extend(full))[0]
        if len(ids) > 1:
            before = behind
            base, full = tracker.move([full, full])
            behind = _log_softmax(lm.engine.extend(full, ids[-1:]))[0]
        if gap.least == 0:
            cuts.add_cut(b"", 0.0, behind)
        starts = continuations(lm, ids[-1], before, _without_end_tokens(lm, behind), how.singles)
        parents = [base if start.instead else full for start in starts]
        branches = tracker.move([base, full, *parents] if base is not full else [full, *parents])
        drafts = [
            _GapDraft(
                branch,
                (ids[:-1] if start.instead else ids) + (start.token,),
                start.adds,
                start.logprob,
            )
            for branch, start in zip(branches[-len(starts) :], starts, strict=True)
        ]
        most = gap.most + (_EXTRA_TOKENS if gap.most > 1 else 0)
        for length in range(1, most + 1):
            logits = concat_logits(
                lm.engine.extend_all([(d.branch, d.history[-1:]) for d in drafts])
            )
            rows = _log_softmax(logits)
            going = [n for n, d in enumerate(drafts) if cuts.add_cut(d.inside, d.logprob, rows[n])]
            going = going[: how.drafts]
            if length == most or not going:
                break
            drafts = _extend_drafts(
                lm, tracker, [drafts[n] for n in going], logits[going], len(ids), how
            )
            if not drafts:
                break
    return cuts.best()


def _extend_drafts(
    lm: Session,
    tracker: HeldBranches,
    drafts: list[_GapDraft],
    logits: Logits,
    prompt: int,
    how: Drafting,
) -> list[_GapDraft]:
    """Extend each draft by one sampled token; drafts that end are dropped."""
    inputs = [RowInput(d.history, prompt, sample=n) for n, d in enumerate(drafts)]
    picks = Chain([how.settings] * len(drafts)).pick(logits, inputs)
    pairs = zip(drafts, picks, strict=True)
    continued = [(d, pick) for d, pick in pairs if lm.engine.token_bytes(pick.token)]
    branches = tracker.move([draft.branch for draft, _ in continued])
    return [
        _GapDraft(
            branch,
            (*draft.history, pick.token),
            draft.inside + lm.engine.token_bytes(pick.token),
            draft.logprob + pick.logprob,
        )
        for branch, (draft, pick) in zip(branches, continued, strict=True)
    ]


class _GapCandidates:
    """Candidate texts cut from drafts, with a promise score each."""

    def __init__(self, lm: Session, right: str, stop: tuple[str, ...]) -> None:
        self._right, self._promise = right, dict[str, float]()
        self._reaches = [key for key in (right[:_KEY_CHARS], *stop) if key]
        self._ends = sorted(lm.end_ids)
        # Possible separators between a draft and the suffix, and the token that would follow.
        spaces = ("", " ") if right[:1].isalnum() else ("",)
        self._following = [(space, first_token(lm, space + right)) for space in spaces]

    def add_cut(self, inside: bytes, logprob: float, row: Floats) -> bool:
        """Add a draft cut here, given the next log-probabilities; False: the draft has ended."""
        text = inside.decode("utf-8", "ignore")
        reached = [at for key in self._reaches if (at := text.find(key)) >= 0]
        if reached:
            self._add(text[: min(reached)], logprob)
            return False
        if text.encode() != inside:  # incomplete UTF-8
            return True
        if not self._right:
            self._add(text, logprob + max((float(row[end]) for end in self._ends), default=0.0))
            return True
        for space, token in self._following:
            if token is not None and not (space and text[-1:].isspace()):
                self._add(text + space, logprob + float(row[token]))
        return True

    def _add(self, text: str, promise: float) -> None:
        self._promise[text] = max(promise, self._promise.get(text, promise))

    def best(self) -> list[str]:
        return sorted(self._promise, key=lambda text: -self._promise[text])


def _log_softmax(logits: Logits) -> Floats:
    """Log-probabilities [rows, vocabulary] on the host."""
    logprobs: Floats = array_operations(logits).to_numpy(log_softmax(logits))
    return logprobs


def _without_end_tokens(lm: Session, row: Floats) -> Floats:
    """Exclude end tokens."""
    row = row.copy()
    row[[token for token in lm.end_ids if token < len(row)]] = -np.inf
    return row
