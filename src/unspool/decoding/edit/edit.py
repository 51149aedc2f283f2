"""Revise a text: find doubtful words, propose better ones, apply them, repeat.

edit = lm.edit("The cat sat at the mat, and then it slept.")
edit.changes                  # each with its probability; those above the threshold are applied
edit.undo(0)                  # any change can be undone and applied again
print(edit.text, edit.before.perplexity, edit.after.perplexity)
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from string import ascii_letters
from typing import Any, Literal

import numpy as np

from unspool.decoding.branches import check_int
from unspool.decoding.infill.causal import (
    Drafting,
    Inside,
    drafted,
    rank,
    start_ids,
    text_ids,
    token_ends,
    truncate_text,
)
from unspool.decoding.infill.fill import draft_settings
from unspool.decoding.infill.masked import (
    MaskedModel,
    add_special_tokens,
    fill_by_masks,
    masked_model,
    text_logprobs,
)
from unspool.decoding.infill.result import Filled, Gap, GappedText, rank_candidates
from unspool.engine.results import Score, brief
from unspool.errors import SettingsError, check_number
from unspool.notebook import bar_html, escape_html, note_html, notebook_html, percent, table_html
from unspool.progress import ProgressCallback, progress_bar
from unspool.sampling.chain import Floats
from unspool.session import Session
from unspool.text.tokenizer.tokenizer import Tokenizer

# -- Doubtful tokens: how surprising each token of a text is, in nats

WAYS = ("auto", "causal", "masked", "both")
_NEXT_WEIGHT = 3.0  # of the next token's surprise (see bench/fill.py: planted errors)
_STRIDE = 8  # every eighth token is masked in one run


@dataclass(frozen=True, slots=True)
class Doubt:
    """A token of a text and its surprise."""

    token: int
    text: str
    start: int  # in characters
    end: int
    surprise: float  # nats; 0 and below: certain


def score_doubts(
    lm: Session, text: str, *, by: str = "auto", twin: MaskedModel | None = None
) -> tuple[list[Doubt], Score]:
    """Surprise of each token, and the causal model's score of the text."""
    if by not in WAYS:
        raise SettingsError(f"doubt must be one of {', '.join(WAYS)}, got {by!r}")
    if twin is None and by in ("masked", "both"):
        raise SettingsError(f"doubt={by!r} needs a masked model; give one: twin=")
    ids = text_ids(lm, text)
    score = document_score(lm, text)
    spans = _spans(lm, ids, text)
    surprises = causal_surprise(score, len(ids))
    if twin is not None and by != "causal":
        masked = _map_spans(spans, *masked_surprise(twin, text))
        surprises = masked if by == "masked" else (surprises + masked) / 2
    tokens = [
        Doubt(token, text[start:end], start, end, float(level))
        for token, (start, end), level in zip(ids, spans, surprises, strict=True)
    ]
    return [doubt for doubt in tokens if doubt.end > doubt.start], score


def document_score(lm: Session, text: str) -> Score:
    """Score a text as a whole document: its first token is scored too."""
    before = len(start_ids(lm))
    return Score(lm.score(text_ids(lm, text)).positions[before:])


def causal_surprise(score: Score, count: int) -> Floats:
    """Surprise of each token, plus how much more than expected the next token surprises.

    A plausible wrong token is no surprise itself, but the token after it is.
    """
    scored = [p for p in score.positions if p.logprob is not None]
    surprise = np.array([-(p.logprob or 0.0) for p in scored])
    excess = surprise - np.array([p.entropy or 0.0 for p in scored])
    following = np.append(excess[1:], 0.0)[: len(surprise)]
    return np.concatenate([np.zeros(count - len(surprise)), surprise + _NEXT_WEIGHT * following])


def masked_surprise(model: MaskedModel, text: str) -> tuple[list[tuple[int, int]], Floats]:
    """Character span and surprise (when masked) of each token of the masked model."""
    encoded: Any = model.tokenizer.encoder.plain.encode(text, add_special_tokens=False)
    ids: list[int] = encoded.ids
    row, before = add_special_tokens(model.tokenizer, ids)
    surprises = np.zeros(len(ids))
    for first in range(min(_STRIDE, len(ids))):
        places = list(range(first, len(ids), _STRIDE))
        hidden = list(row)
        for place in places:
            hidden[place + before] = model.mask_id
        logprobs = text_logprobs(model, hidden, [place + before for place in places])
        surprises[places] = [-logprobs[n, ids[place]] for n, place in enumerate(places)]
    return list(encoded.offsets), surprises


def _spans(lm: Session, ids: Sequence[int], text: str) -> list[tuple[int, int]]:
    """Character span of each token; a character split over tokens belongs to the last."""
    character_ends = [0]  # number of characters that end by each byte
    for at, character in enumerate(text):
        character_ends += [at] * (len(character.encode()) - 1) + [at + 1]
    ends = [
        character_ends[min(max(0, end), len(character_ends) - 1)]
        for end in token_ends(lm, ids, text)
    ]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _map_spans(
    spans: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]], values: Floats
) -> Floats:
    """Map values of another tokenization to these spans: the maximum of overlapping tokens."""
    values_here, first = np.zeros(len(spans)), 0
    for n, (start, end) in enumerate(spans):
        while first < len(others) and others[first][1] <= start:
            first += 1
        at = first
        while at < len(others) and others[at][0] < end:
            values_here[n] = max(values_here[n], values[at])
            at += 1
    return values_here


# -- Correct typing errors: known words at edit distance one

_LETTERS = re.compile(r"[^\W\d_]{3,}")
_MAX_CORRECTIONS = 6


def spelling_corrections(tokenizer: Tokenizer, word: str, text: str) -> list[str]:
    """Known words at edit distance one: swapped letters first, then by frequency. Empty for a known
    word."""
    vocabulary = _vocabulary_words(tokenizer)
    if not _LETTERS.fullmatch(word) or word in vocabulary:
        return []
    text_words = {
        other for other in _LETTERS.findall(text) if other != word and other not in vocabulary
    }
    rank = {**dict.fromkeys(text_words, 0), **vocabulary}
    swaps = dict.fromkeys(slip for slip in _swaps(word) if slip in rank)
    letters = set(ascii_letters if word.isascii() else filter(str.isalpha, text))
    others = {slip for slip in _edits(word, letters) if slip in rank and slip not in swaps}
    return [*swaps, *sorted(others, key=lambda slip: (rank[slip], slip))][:_MAX_CORRECTIONS]


def alike(first: str, second: str) -> bool:
    """Whether two words differ by one insertion, deletion, substitution or swap of neighbours."""
    short, long = sorted((first, second), key=len)
    at = next((n for n, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    if len(short) < len(long):
        return short[at:] == long[at + 1 :]
    swapped = long[at + 1 : at + 2] + long[at : at + 1] + long[at + 2 :]
    return short[at + 1 :] == long[at + 1 :] or short[at:] == swapped


@lru_cache(maxsize=4)
def _vocabulary_words(tokenizer: Tokenizer) -> dict[str, int]:
    """Words of the vocabulary that follow a space, with their token id: lower ids are more
    common."""
    words = dict[str, int]()
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.token_bytes(token).decode("utf-8", "ignore")
        if piece[:1] == " " and _LETTERS.fullmatch(piece[1:]):
            words.setdefault(piece[1:], token)
    return words


def _swaps(word: str) -> Iterator[str]:
    for n in range(len(word) - 1):
        yield word[:n] + word[n + 1] + word[n] + word[n + 2 :]


def _edits(word: str, letters: set[str]) -> Iterator[str]:
    for n in range(len(word) + 1):
        yield word[:n] + word[n + 1 :]
        for letter in letters:
            yield word[:n] + letter + word[n:]
            yield word[:n] + letter + word[n + 1 :]


# -- Changes to a text that can be applied and undone in any order


@dataclass(slots=True, eq=False, repr=False)
class Change:
    """A replacement of some words."""

    number: int
    start: int  # character offset in the current text
    old: str
    new: str
    probability: float  # of the new words among the candidates, old words included
    gain: float  # increase of the log-probability of the text, in nats
    doubt: float  # how doubtful the old words were
    in_pass: int  # pass that proposed it
    alternatives: tuple[tuple[str, float], ...] = ()  # the candidates, with probabilities
    applied: bool = False
    above: list[Change] = field(default_factory=list)  # overlapping changes made later

    @property
    def text(self) -> str:
        """Words currently at its position."""
        return self.new if self.applied else self.old

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    def __repr__(self) -> str:
        state = "applied" if self.applied else "proposed"
        words = f"{brief(self.old, 24)} → {brief(self.new, 24)}"
        return f"<Change {self.number}: {words}, {self.probability:.0%}, {state}>"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = ("number", "start", "old", "new", "probability", "gain", "doubt", "applied")
        fields = {name: getattr(self, name) for name in names}
        return {
            **fields,
            "pass": self.in_pass,
            "alternatives": [list(a) for a in self.alternatives],
        }


class ChangedText:
    """A text and all changes proposed for it.

    Attributes:
        original: The text before any change.
        text: The text with the changes that are applied.
        changes: All proposed changes, applied or not.
    """

    def __init__(self, text: str) -> None:
        self.original = self.text = text
        self.changes: list[Change] = []

    def propose(self, start: int, old: str, new: str, **facts: Any) -> Change:
        """Add a proposed change without applying it. If the same change is already proposed and not
        blocked, it keeps its number and gets the new facts."""
        assert old and new and self.text[start : start + len(old)] == old
        for existing in self.changes:
            is_open = not (existing.applied or existing.above)
            if is_open and (existing.start, existing.old, existing.new) == (start, old, new):
                for name, value in facts.items():
                    setattr(existing, name, value)
                return existing
        change = Change(len(self.changes), start, old, new, **facts)
        self.changes.append(change)
        return change

    def apply(self, number: int) -> None:
        """Apply a change."""
        change = self._change(number)
        if change.applied:
            raise SettingsError(f"change {number} is already applied; undo({number}) reverts it")
        self._check_open(change)
        self._switch(change)

    def undo(self, number: int) -> None:
        """Undo a change."""
        change = self._change(number)
        if not change.applied:
            raise SettingsError(f"change {number} is not applied; apply({number}) applies it")
        self._check_open(change)
        self._switch(change)

    def _change(self, number: int) -> Change:
        if not 0 <= number < len(self.changes):
            count = len(self.changes)
            valid = f"valid are 0 to {count - 1}" if count else "there are none"
            raise SettingsError(f"there is no change {number!r}; {valid}")
        return self.changes[number]

    def _check_open(self, change: Change) -> None:
        if not change.above:
            return
        above = change.above[-1]
        what = f"undo({above.number})" if above.applied else f"apply({above.number})"
        raise SettingsError(
            f"change {change.number} overlaps change {above.number}, which changed its words; "
            f"first: {what}"
        )

    def _switch(self, change: Change) -> None:
        """Swap the words of a change and update the positions of the others."""
        start, end = change.start, change.end
        replacement = change.old if change.applied else change.new
        for other in self.changes:
            if change in other.above:
                other.above.remove(change)
                continue
            first, last = _region(other)
            if other is not change and first < end and start < last:
                other.above.append(change)
            elif first >= end:
                other.start += len(replacement) - (end - start)
        self.text = self.text[:start] + replacement + self.text[end:]
        change.applied = not change.applied


def _region(change: Change) -> tuple[int, int]:
    """Character range of a change's words, or of what overlapping changes made of them."""
    first, last = change.start, change.end
    for above in change.above:
        grown = len(above.new) - len(above.old)
        last += grown if above.applied else -grown
    reaches = [_region(above) for above in change.above]
    return min([first, *(r[0] for r in reaches)]), max([last, *(r[1] for r in reaches)])


# -- Replacements for a doubtful word, with probabilities that use both sides

_WORD = re.compile(r"\w+(?:['’\-]\w+)*")
_PUNCTUATION = re.compile(r"[^\w\s]+")
_UNIT = re.compile(f"{_WORD.pattern}|{_PUNCTUATION.pattern}")
_TYPO_DISCOUNT = math.log(20)  # nats of trust less for a word with similar spelling


@dataclass(frozen=True, slots=True)
class EditUnit:
    """A word or a run of punctuation: replaced as a whole."""

    start: int
    text: str
    doubt: float
    tokens: int  # that overlap it


def split_units(text: str, doubts: Sequence[Doubt]) -> list[EditUnit]:
    """Words and punctuation of a text, most doubtful first, by their worst token."""
    result, first = list[EditUnit](), 0
    for match in _UNIT.finditer(text):
        while first < len(doubts) and doubts[first].end <= match.start():
            first += 1
        overlapping = list(_overlapping(doubts, first, match.end()))
        if overlapping:
            worst = max(doubt.surprise for doubt in overlapping)
            result.append(EditUnit(match.start(), match[0], worst, len(overlapping)))
    return sorted(result, key=lambda unit: (-unit.doubt, unit.start))


def _overlapping(doubts: Sequence[Doubt], first: int, end: int) -> Iterator[Doubt]:
    for doubt in doubts[first:]:
        if doubt.start >= end:
            return
        yield doubt


def propose_replacements(
    lm: Session,
    text: str,
    unit: EditUnit,
    how: Drafting,
    *,
    reach: int | None,
    twin: MaskedModel | None = None,
    trust: float = 0.0,
    shortlist: int | None = None,
) -> tuple[Filled, ...]:
    """Replacements of a unit, best first, the current text included.

    With `shortlist`, all candidates are ranked by the next tokens only, and then this many of them
    by `reach`, unless the current text is clearly the best already.

    A word is replaced by a word and punctuation by punctuation, so that texts of similar length are
    compared: a shorter text is nearly always likelier. Scores are the model's; order and
    probabilities include the trust in the current text.
    """
    prefix, suffix = text[: unit.start], text[unit.start + len(unit.text) :]
    gap = Gap(1, unit.tokens + 1)
    kind = _WORD if _WORD.fullmatch(unit.text) else _PUNCTUATION

    def fits(text: str) -> bool:
        return kind.fullmatch(text) is not None

    gapped = GappedText((prefix, suffix), (gap,))
    # An unknown word that is nearly a known one is most likely a typing error.
    candidates = spelling_corrections(lm.tokenizer, unit.text, text)
    if not candidates:
        candidates = drafted(lm, prefix, truncate_text(lm, suffix, reach), gap, how, fits)
        if twin is not None:
            near = GappedText(
                (prefix[-_MASKED_CONTEXT_CHARS:], suffix[:_MASKED_CONTEXT_CHARS]),
                (Gap(1, min(3, gap.most)),),
            )
            masked = fill_by_masks(twin, near, candidates=how.candidates)
            candidates += [filled.texts[0] for filled in masked]
    pool: list[Inside] = [(text,) for text in dict.fromkeys((unit.text, *candidates)) if fits(text)]
    if shortlist is not None:
        ranked = rank(lm, gapped, pool, reach=_SHORTLIST_REACH, free=True)
        if ranked[0].texts[0] == unit.text and ranked[0].probability >= _CLEARLY_BEST:
            return ranked
        finalists = {filled.texts for filled in ranked[:shortlist]}
        pool = [texts for texts in pool if texts in finalists or texts == (unit.text,)]
    return _rank_with_trust(rank(lm, gapped, pool, reach=reach, free=True), unit.text, trust)


def replacement_penalty(old: str, new: str, trust: float) -> float:
    """Penalty in nats for replacing `old` by `new`."""
    if new == old:
        return 0.0
    return max(0.0, trust - _TYPO_DISCOUNT) if alike(old, new) else trust


def _rank_with_trust(candidates: Sequence[Filled], old: str, trust: float) -> tuple[Filled, ...]:
    """Rank candidates with the trust in the current text."""
    scores = {filled.texts: filled.score for filled in candidates}
    lowered = [
        replace(
            candidate, score=candidate.score - replacement_penalty(old, candidate.texts[0], trust)
        )
        for candidate in candidates
    ]
    return tuple(
        replace(candidate, score=scores[candidate.texts]) for candidate in rank_candidates(lowered)
    )


_SHORTLIST_REACH, _CLEARLY_BEST = 3, 0.9
_MASKED_CONTEXT_CHARS = 1_000  # on each side, for a masked model


DiffKind = Literal["same", "removed", "added"]
_PIECES = re.compile(r"\s+|\w+|[^\w\s]")
MIN_SURPRISE = 0.5  # nats below which a word is skipped
_CONTEXT_CHARS = 200  # around a word; if they change, the word is tried again


class Edit(ChangedText):
    """A text under revision: all proposed changes, and scores before and after."""

    def __init__(self, lm: Session, text: str) -> None:
        super().__init__(text)
        self._lm = lm
        self.before: Score = document_score(lm, text)  # of the original text
        self.doubts: list[Doubt] = []  # of the original text's tokens
        self.passes = 0  # over the text
        self.weighed = 0  # tokens scored to rank proposals
        self._after: tuple[str, Score] = (text, self.before)

    @property
    def after(self) -> Score:
        """The text as it is now."""
        if self._after[0] != self.text:
            self._after = self.text, document_score(self._lm, self.text)
        return self._after[1]

    @property
    def applied(self) -> list[Change]:
        """The applied changes."""
        return [change for change in self.changes if change.applied]

    def tracked(self) -> Iterator[tuple[DiffKind, str]]:
        """Word-level diff of original and text: (kind, words) pairs."""
        old, new = _PIECES.findall(self.original), _PIECES.findall(self.text)
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        for tag, a, b, c, d in matcher.get_opcodes():
            if tag == "equal":
                yield "same", "".join(old[a:b])
                continue
            if b > a:
                yield "removed", "".join(old[a:b])
            if d > c:
                yield "added", "".join(new[c:d])

    def diff(self, name: str = "text") -> str:
        """The changes as a unified diff."""
        lines = difflib.unified_diff(
            self.original.splitlines(keepends=True),
            self.text.splitlines(keepends=True),
            name,
            f"{name} (edited)",
        )
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
                       for line in lines)  # fmt: skip

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        applied = f"{len(self.applied)} of {len(self.changes)} changes made"
        scores = f"perplexity {self.before.perplexity:.4g} → {self.after.perplexity:.4g}"
        return f"<Edit {brief(self.text)}, {applied}, {scores}>"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "text": self.text,
            "original": self.original,
            "perplexity_before": self.before.perplexity,
            "perplexity_after": self.after.perplexity,
            "logprob_before": self.before.total,
            "logprob_after": self.after.total,
            "passes": self.passes,
            "weighed": self.weighed,
            "changes": [change.to_dict() for change in self.changes],
        }

    def _repr_html_(self) -> str:
        words = {"same": "{}", "removed": "<del>{}</del>", "added": "<ins>{}</ins>"}
        text = "".join(words[kind].format(escape_html(piece)) for kind, piece in self.tracked())
        rows = [
            (str(c.number), escape_html(c.old), escape_html(c.new),
             bar_html(c.probability, 1.0) + " " + percent(c.probability),
             "yes" if c.applied else "no")
            for c in self.changes
        ]  # fmt: skip
        summary = note_html(
            f"perplexity {self.before.perplexity:.4g}, now {self.after.perplexity:.4g}, after "
            f"{self.passes} passes"
        )
        head = ("number", "instead of", "now", "probability", "made")
        return notebook_html(f'<div class="text">{text}</div>', table_html(head, rows), summary)


def edit(
    lm: Session,
    text: str,
    *,
    twin: Session | MaskedModel | None = None,
    doubt: str = "auto",
    threshold: float = 0.99,
    trust: float = 10.0,
    passes: int = 3,
    budget: int | None = None,
    places: int = 24,
    candidates: int = 12,
    reach: int | None = 24,
    progress: bool = True,
) -> Edit:
    """Revise a text; see `LanguageModel.edit`."""
    if not isinstance(text, str) or not text.strip():
        raise SettingsError("text must contain words; there is nothing to edit")
    if lm.config.sight != "causal":
        raise SettingsError(
            "edits are ranked by a causal model; load one, and give this one as its twin: "
            "lm.edit(text, twin=masked)"
        )
    check_number("threshold", threshold, 0, 1)
    check_number("trust", trust, 0)
    if reach is not None:
        check_int("reach", reach)
    check_int("passes", passes)
    check_int("places", places)
    check_int("candidates", candidates)
    if budget is not None:
        check_int("budget", budget, least=0)
    result = Edit(lm, text)
    reviser = _Reviser(
        lm,
        result,
        replace(draft_settings(lm, {}, candidates=candidates, drafts=2), singles=2 * candidates),
        masked_model(twin) if twin is not None else None,
        doubt,
        reach,
        threshold,
        trust,
        budget,
    )
    with progress_bar("revising", passes * places, show=progress) as report:
        changed = True
        while changed and result.passes < passes:
            changed = reviser.run(places, report)
    return result


class _Reviser:
    """Revises a text in passes."""

    def __init__(
        self,
        lm: Session,
        edit: Edit,
        how: Drafting,
        twin: MaskedModel | None,
        by: str,
        reach: int | None,
        threshold: float,
        trust: float,
        budget: int | None,
    ) -> None:
        self._lm, self._edit, self._settings, self._twin = lm, edit, how, twin
        self._doubt_by, self._reach, self._threshold, self._budget = by, reach, threshold, budget
        self._trust = trust
        self._tried: set[tuple[str, str, str]] = set()

    def run(self, places: int, tell: ProgressCallback) -> bool:
        """Run one pass, most doubtful words first; True if another pass may change something."""
        edit = self._edit
        token_doubts, _ = score_doubts(self._lm, edit.text, by=self._doubt_by, twin=self._twin)
        edit.doubts = edit.doubts or token_doubts
        shifts: list[tuple[int, int]] = []  # (offset, length change) of the changes in this pass
        num_tried, is_changed = 0, False
        for unit in split_units(edit.text, token_doubts):
            if num_tried == places or unit.doubt < MIN_SURPRISE or self._is_spent():
                break
            moved = unit.start + sum(by for at, by in shifts if at <= unit.start)
            if not self._is_new(unit, moved):
                continue
            num_tried += 1
            tell(edit.passes * places + num_tried)
            change = self._change(unit, moved)
            if change is not None and change.probability >= self._threshold:
                edit.apply(change.number)
                shifts.append((unit.start, len(change.new) - len(change.old)))
                is_changed = True
        edit.passes += 1
        return is_changed and not self._is_spent()

    def _is_spent(self) -> bool:
        return self._budget is not None and self._edit.weighed >= self._budget

    def _is_new(self, unit: EditUnit, start: int) -> bool:
        """Whether this word has not been tried in this context."""
        text, end = self._edit.text, start + len(unit.text)
        around = (
            text[max(0, start - _CONTEXT_CHARS) : start],
            unit.text,
            text[end : end + _CONTEXT_CHARS],
        )
        if around in self._tried:
            return False
        self._tried.add(around)
        return True

    def _change(self, unit: EditUnit, start: int) -> Change | None:
        """Propose a change if something else is likelier than the current word."""
        edit = self._edit
        here = EditUnit(start, unit.text, unit.doubt, unit.tokens)
        candidates = propose_replacements(
            self._lm, edit.text, here, self._settings,
            reach=self._reach, twin=self._twin, trust=self._trust,
        )  # fmt: skip
        edit.weighed += sum(len(filled.steps) for filled in candidates)
        best = candidates[0]
        if best.texts[0] == unit.text:
            return None
        now = next(filled for filled in candidates if filled.texts[0] == unit.text)
        return edit.propose(
            start,
            unit.text,
            best.texts[0],
            probability=best.probability,
            gain=best.score - now.score,
            doubt=unit.doubt,
            in_pass=edit.passes,
            alternatives=tuple((filled.texts[0], filled.probability) for filled in candidates),
        )
