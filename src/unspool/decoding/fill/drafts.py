"""What a causal model would write into a gap: candidates, drafted from the left.

Half of them follow the left side alone. For the other half the model has read the whole text once
already, with ___ in the gap, and then the left side again: so it knows what is to come. Which of
them is good is not asked here.

The likeliest first tokens are found (healed at the border, see `borders.py`), and the best of them
are gone on with, side by side, each a branch of its own. A draft may be cut wherever the right side
could begin: behind each of its tokens, and where its text runs into the right side's own words.
What the model says there of the right side's first token tells which cuts are worth judging in
full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice, zip_longest

import numpy as np

from unspool.backends.step import Logits
from unspool.decoding.fill.borders import beginnings, first_token, text_ids
from unspool.decoding.fill.gaps import Gap
from unspool.decoding.written import Branches
from unspool.engine.branch import Branch
from unspool.engine.picking import joined
from unspool.sampling import Chain, RowInput, SamplingSettings
from unspool.sampling.operations import operations
from unspool.sampling.scoring import Floats, log_softmax
from unspool.session import Session

_KEY = 12  # characters of the right side that a draft is searched for
_MORE = 2  # tokens that a draft may have too many: cut anew, they may be fewer
_AGAIN = 240  # characters of the left side that are read again


@dataclass(frozen=True, slots=True)
class Drafting:
    """How candidates are looked for."""

    settings: SamplingSettings
    singles: int = 64  # first tokens that are weighed
    drafts: int = 6  # of them that are gone on with
    candidates: int = 20  # cuts that are worth judging in full
    stop: tuple[str, ...] = ()  # strings that end a draft


@dataclass(frozen=True, slots=True)
class _Draft:
    """A text on its way into the gap."""

    branch: Branch
    history: tuple[int, ...]  # every token, the last of which is still to be read
    inside: bytes  # what stands in the gap so far
    logprob: float


def drafted(
    lm: Session, left: str, right: str, gap: Gap, how: Drafting, fits: Callable[[str], bool]
) -> list[str]:
    """Texts for the gap that fit it, the most promising first."""
    ways = [_cuts(lm, left, right, gap, how)]
    if right.strip():
        known = replace(how, singles=how.candidates)
        ways.append(_cuts(lm, f"{left}___{right}\n{_end(left)}", right, gap, known))
    turns = dict.fromkeys(text for pair in zip_longest(*ways) for text in pair if text is not None)
    return list(islice(filter(fits, turns), how.candidates))


def _end(text: str) -> str:
    """The end of a text, from the beginning of a word on."""
    return text if len(text) <= _AGAIN else text[-_AGAIN:].partition(" ")[2]


def _cuts(lm: Session, left: str, right: str, gap: Gap, how: Drafting) -> list[str]:
    """Texts that could follow the left side, and be followed by the right; promising ones first."""
    cuts = _Cuts(lm, right, how.stop)
    ids = tuple(text_ids(lm, left))
    with Branches(lm.engine, lm.adapter) as held:
        # Two branches stand before the gap: with the last token, and without, to heal it.
        full, before = held.open(ids[:-1] or ids), None
        base, behind = full, _own(lm.engine.extend(full))[0]
        if len(ids) > 1:
            before = behind
            base, full = held.move([full, full])
            behind = _own(lm.engine.extend(full, ids[-1:]))[0]
        if gap.least == 0:
            cuts.note(b"", 0.0, behind)
        found = beginnings(lm, ids[-1], before, _text_only(lm, behind), how.singles)
        parents = [base if one.instead else full for one in found]
        branches = held.move([base, full, *parents] if base is not full else [full, *parents])
        alive = [
            _Draft(branch, (ids[:-1] if one.instead else ids) + (one.token,), one.adds, one.logprob)
            for branch, one in zip(branches[-len(found) :], found, strict=True)
        ]
        most = gap.most + (_MORE if gap.most > 1 else 0)
        for length in range(1, most + 1):
            logits = joined(lm.engine.extend_all([(d.branch, d.history[-1:]) for d in alive]))
            rows = _own(logits)
            going = [n for n, d in enumerate(alive) if cuts.note(d.inside, d.logprob, rows[n])]
            going = going[: how.drafts]
            if length == most or not going:
                break
            alive = _further(lm, held, [alive[n] for n in going], logits[going], len(ids), how)
            if not alive:
                break
    return cuts.best()


def _further(
    lm: Session, held: Branches, drafts: list[_Draft], logits: Logits, prompt: int, how: Drafting
) -> list[_Draft]:
    """Each draft with one more token, picked as the settings say; those that end are left out."""
    inputs = [RowInput(d.history, prompt, sample=n) for n, d in enumerate(drafts)]
    picks = Chain([how.settings] * len(drafts)).pick(logits, inputs)
    pairs = zip(drafts, picks, strict=True)
    going = [(d, pick) for d, pick in pairs if lm.engine.token_bytes(pick.token)]
    branches = held.move([draft.branch for draft, _ in going])
    return [
        _Draft(
            branch,
            (*draft.history, pick.token),
            draft.inside + lm.engine.token_bytes(pick.token),
            draft.logprob + pick.logprob,
        )
        for branch, (draft, pick) in zip(branches, going, strict=True)
    ]


class _Cuts:
    """The texts that drafts give when they are cut, and how promising each is."""

    def __init__(self, lm: Session, right: str, stop: tuple[str, ...]) -> None:
        self._right, self._found = right, dict[str, float]()
        self._reaches = [key for key in (right[:_KEY], *stop) if key]
        self._ends = sorted(lm.end_ids)
        # What may stand between a draft and the right side, and the token that would follow.
        spaces = ("", " ") if right[:1].isalnum() else ("",)
        self._following = [(space, first_token(lm, space + right)) for space in spaces]

    def note(self, inside: bytes, logprob: float, row: Floats) -> bool:
        """Weigh a draft cut here, given what follows it; False: it has come to its end."""
        text = inside.decode("utf-8", "ignore")
        reached = [at for key in self._reaches if (at := text.find(key)) >= 0]
        if reached:
            self._add(text[: min(reached)], logprob)
            return False
        if text.encode() != inside:  # the middle of a character
            return True
        if not self._right:
            self._add(text, logprob + max((float(row[end]) for end in self._ends), default=0.0))
            return True
        for space, token in self._following:
            if token is not None and not (space and text[-1:].isspace()):
                self._add(text + space, logprob + float(row[token]))
        return True

    def _add(self, text: str, promise: float) -> None:
        self._found[text] = max(promise, self._found.get(text, promise))

    def best(self) -> list[str]:
        return sorted(self._found, key=lambda text: -self._found[text])


def _own(logits: Logits) -> Floats:
    """The model's own log-probabilities, [rows, vocabulary]."""
    found: Floats = operations(logits).host(log_softmax(logits))
    return found


def _text_only(lm: Session, row: Floats) -> Floats:
    """Without the tokens that are no text."""
    row = row.copy()
    row[[token for token in lm.end_ids if token < len(row)]] = -np.inf
    return row
