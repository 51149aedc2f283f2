"""Infilling with any causal model: draft candidates for the gap and rank them with the suffix.

By Bayes, p(gap | prefix, suffix) is proportional to p(gap, suffix | prefix): the candidate with the
likeliest whole text fits both sides best. Several gaps are filled from left to right, keeping the
best few fillings of the earlier ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, zip_longest

import numpy as np

from unspool.backends.step import Logits
from unspool.decoding.branches import HeldBranches
from unspool.decoding.infill.result import Filled, Gap, GappedText, clip_steps, rank_candidates
from unspool.engine.loop import concat_logits
from unspool.engine.request import check_fits
from unspool.engine.results import Candidate, Step
from unspool.engine.tree import Branch
from unspool.errors import UnspoolError
from unspool.sampling import Chain, RowInput, SamplingSettings, score
from unspool.sampling.arrays import array_operations
from unspool.sampling.chain import Floats, log_softmax
from unspool.session import Session
from unspool.text.tokenizer.stream import TextStream
from unspool.text.tokenizer.tokenizer import Tokenizer

# -- Token boundaries at the edges of a gap

Ids = list[int]
_STARTS = ("<|endoftext|>", "<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<s>")


def text_ids(lm: Session, text: str) -> Ids:
    """Tokenize a text after the token that starts a document, so that its first token is predicted
    too."""
    return [*start_ids(lm), *lm.tokenizer.encode(text)]


def start_ids(lm: Session) -> Ids:
    """The token that starts a document, if the vocabulary has one."""
    tokenizer = lm.tokenizer
    candidates = [tokenizer.special_tokens.get(text) for text in _STARTS]
    if tokenizer.add_bos:
        candidates = []
    for token in (*candidates, tokenizer.bos_id, tokenizer.eos_id):
        if token is not None:
            return [token]
    return []


def token_ends(lm: Session, ids: Sequence[int], text: str) -> list[int]:
    """Byte offset in the text at which each token ends."""
    pieces = [lm.engine.token_bytes(token) for token in ids]
    added = sum(map(len, pieces)) - len(text.encode())
    ends, at = list[int](), 0
    for piece in pieces:
        if added == 1 and at == 0 and piece.startswith(b" "):  # added by the tokenizer
            at, added = -1, 0
        at += len(piece)
        ends.append(at)
    return ends


def tokens_within(ends: Sequence[int], start: int, end: int) -> range:
    """Range of tokens that overlap the bytes from `start` to `end`."""
    first = next((n for n, at in enumerate(ends) if at > start), len(ends))
    if end <= start:
        return range(first, first)
    return range(first, next((n + 1 for n, at in enumerate(ends) if at >= end), len(ends)))


@lru_cache(maxsize=4)
def _token_table(tokenizer: Tokenizer) -> list[bytes]:
    """Bytes of every token; empty for control tokens."""
    control = tokenizer.special_ids
    return [b"" if n in control else tokenizer.token_bytes(n) for n in range(tokenizer.vocab_size)]


@dataclass(frozen=True, slots=True)
class Continuation:
    """A possible next token of a text, or a longer replacement of its last token."""

    token: int
    adds: bytes  # added to the text
    logprob: float  # given the tokens before the last one
    instead: bool  # replaces the last token, which it starts with


def continuations(
    lm: Session, last: int, before: Floats | None, after: Floats, count: int
) -> list[Continuation]:
    """The likeliest continuations, with token healing. `before` and `after` are the
    log-probabilities of the token after all tokens but the last (None: there are none), and after
    the last."""
    table = _token_table(lm.tokenizer)
    text = table[last] if last < len(table) else b""
    result = list[Continuation]()
    last_logprob = 0.0  # of the last token, if it could be replaced
    if text and before is not None:
        last_logprob = float(before[last])
        longer = _longer_tokens(lm.tokenizer, text)
        for place in _top_indices(before[longer], count):
            token = longer[place]
            adds = table[token][len(text) :]
            result.append(Continuation(token, adds, float(before[token]), instead=True))
    result += [
        Continuation(token, table[token], last_logprob + float(after[token]), instead=False)
        for token in _top_indices(after[: len(table)], count)
        if table[token]
    ]
    return sorted(result, key=lambda entry: -entry.logprob)[:count]


def _longer_tokens(tokenizer: Tokenizer, text: bytes) -> list[int]:
    """The tokens that start with this text and have more, in the order of their ids."""
    pieces, ids = _sorted_tokens(tokenizer)
    first = bisect_right(pieces, text)
    last = bisect_left(pieces, text + b"\xff" * 8, first)  # longer than any run of 0xff in a token
    return sorted(ids[first:last])


@lru_cache(maxsize=4)
def _sorted_tokens(tokenizer: Tokenizer) -> tuple[list[bytes], list[int]]:
    """The bytes of all tokens in order, and their ids."""
    table = _token_table(tokenizer)
    ids = sorted(range(len(table)), key=table.__getitem__)
    return [table[token] for token in ids], ids


def _top_indices(row: Floats, count: int) -> list[int]:
    """Indices of the highest values, the highest first; equal ones in their order."""
    if len(row) > 4 * count:
        least = np.partition(row, len(row) - count)[len(row) - count]
        places = np.flatnonzero(row >= least)
    else:
        places = np.arange(len(row))
    best = places[np.argsort(-row[places], kind="stable")[:count]]
    return [int(place) for place in best]


def first_token(lm: Session, text: str) -> int | None:
    """First token of a text that continues another text."""
    ids: list[int] = []
    if lm.tokenizer.missing_character(",") is None:
        ids = lm.tokenizer.encode("," + text)
    if len(ids) > 1 and lm.tokenizer.decode_bytes(ids[:1]).strip() == b",":
        return ids[1]
    alone = lm.tokenizer.encode(text)
    return alone[0] if alone else None


def truncate_text(lm: Session, text: str, count: int | None) -> str:
    """The first `count` tokens of a text, whole characters only; None: all of it."""
    if count is None or len(text) <= count:
        return text
    ids = lm.tokenizer.encode(text)
    num_bytes = len(lm.tokenizer.decode_bytes(ids[:count]))
    return text.encode()[:num_bytes].decode("utf-8", "ignore")


# -- Draft candidates for a gap with a causal model

_KEY_CHARS = 12  # of the suffix, searched for in drafts
_EXTRA_TOKENS = 2  # drafted beyond the gap: tokenized again, the text may have fewer


@dataclass(frozen=True, slots=True)
class Drafting:
    """Settings for drafting candidates."""

    settings: SamplingSettings
    singles: int = 64  # first tokens considered
    drafts: int = 6  # of them that are continued
    candidates: int = 20  # cuts to score in full
    stop: tuple[str, ...] = ()  # strings that end a draft
    repeated_chars: int = 240  # of the prefix, repeated after the whole text


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
        again = f"{prefix}___{suffix}\n{_tail(prefix, how.repeated_chars)}"
        sources.append(_draft_cuts(lm, again, suffix, gap, second_settings))
    alternating = dict.fromkeys(
        text for pair in zip_longest(*sources) for text in pair if text is not None
    )
    return list(islice(filter(fits, alternating), how.candidates))


def _tail(text: str, size: int) -> str:
    """The end of a text, starting at a word."""
    return text if len(text) <= size else text[-size:].partition(" ")[2]


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


# -- Exact log-probabilities of texts with a common prefix, which is computed once

_MAX_LOGIT_ROWS = 256  # per batch: bounds memory use
_MAX_FORKS = 32  # texts per batch


def shared_length(rows: Sequence[Sequence[int]]) -> int:
    """Length of the common prefix; at least one token per row is left out."""
    shortest = min(map(len, rows)) - 1
    columns = zip(*(row[:shortest] for row in rows), strict=True)
    return next((n for n, column in enumerate(columns) if len({*column}) > 1), shortest)


def score_rows(
    lm: Session, rows: Sequence[Sequence[int]], shared: int, top: int = 0
) -> list[list[Step]]:
    """Score each row's tokens from position `shared` on. All rows share the tokens before that and
    have at least one more."""
    results = list[list[Step]]()
    with HeldBranches(lm.engine, lm.adapter) as tracker:
        root = tracker.open(rows[0][:shared])
        first = lm.engine.extend(root)
        for group in _groups(rows, shared):
            read = [row for row in group if len(row) > shared + 1]
            root, *forks = tracker.move([root] * (len(read) + 1))
            additions = [(fork, row[shared:-1]) for fork, row in zip(forks, read, strict=True)]
            num_logits = [len(tokens) for _, tokens in additions]
            rest_logits = (
                iter(lm.engine.extend_all(additions, num_logits=num_logits)) if read else iter(())
            )
            for row in group:
                logits = (
                    concat_logits([first, next(rest_logits)]) if len(row) > shared + 1 else first
                )
                results.append(steps_from_logits(lm, logits, row[shared:], shared, top))
            tracker.move([root])
    return results


def _groups(rows: Sequence[Sequence[int]], shared: int) -> Iterator[list[Sequence[int]]]:
    group, size = list[Sequence[int]](), 0
    for row in rows:
        if group and (size + len(row) - shared > _MAX_LOGIT_ROWS or len(group) == _MAX_FORKS):
            yield group
            group, size = [], 0
        group.append(row)
        size += len(row) - shared
    yield group


def steps_from_logits(
    lm: Session, logits: Logits, tokens: Sequence[int], position: int, top: int
) -> list[Step]:
    """Build steps for given tokens from the logits before each."""
    scores, stream, steps = score(logits, tokens, top), TextStream(), list[Step]()
    for row, token in enumerate(tokens):
        piece, partial_utf8 = lm.engine.token_bytes(token), stream.partial_utf8
        best = zip(scores.top_tokens[row], scores.top_logprobs[row], strict=True)
        steps.append(
            Step(
                token=token,
                bytes=piece,
                text=stream.push(piece),
                logprob=float(scores.logprobs[row]),
                position=position + row,
                rank=int(scores.ranks[row]),
                entropy=float(scores.entropies[row]),
                probability=1.0,
                candidates=tuple(
                    Candidate(int(t), lm.readable(int(t), partial_utf8), float(p), math.exp(p))
                    for t, p in best
                ),
                partial_utf8=partial_utf8,
            )
        )
    return steps


Inside = tuple[str, ...]  # fillings of the first gaps
_BEAM = 4  # fillings of the earlier gaps that are continued


def fill_by_ranking(
    lm: Session,
    gapped: GappedText,
    how: Drafting,
    *,
    reach: int | None,
    top: int = 0,
    proposed: Sequence[Inside] = (),
    only: bool = False,
) -> tuple[Filled, ...]:
    """Fill a text; returns candidates, best first.

    reach      number of tokens after a gap that are scored; None: all.
    proposed   additional fillings; with `only`, no others are drafted.
    """
    beam: list[Inside] = [()]
    ranked: tuple[Filled, ...] = ()
    for number, gap in enumerate(gapped.gaps):
        pool = dict.fromkeys(texts[: number + 1] for texts in proposed)
        if not only:
            pool |= dict.fromkeys(
                (*before, inside)
                for before in beam
                for inside in _draft_gap(lm, gapped, before, gap, reach, how)
            )
        ranked = rank(lm, gapped, pool, reach=reach, top=top, free=only)
        beam = [filled.texts for filled in ranked[:_BEAM]]
    return ranked


def _draft_gap(
    lm: Session, gapped: GappedText, before: Inside, gap: Gap, reach: int | None, how: Drafting
) -> list[str]:
    number = len(before)
    prefix = gapped.first(number).filled(before)
    suffix = truncate_text(lm, gapped.texts[number + 1], reach)

    def fits(inside: str) -> bool:
        return _CandidateText.build(lm, gapped, (*before, inside), reach).fits(gapped.gaps)

    return drafted(lm, prefix, suffix, gap, how, fits)


def rank(
    lm: Session,
    gapped: GappedText,
    pool: Iterable[Inside],
    *,
    reach: int | None,
    top: int = 0,
    free: bool = False,
) -> tuple[Filled, ...]:
    """Rank fillings of the first gaps by the exact log-probability of the text up to `reach` tokens
    after the last filled gap, given their common prefix.

    `free`: allow candidates of any length.
    """
    rows = [_CandidateText.build(lm, gapped, inside, reach) for inside in pool]
    fitting = [row for row in rows if free or row.fits(gapped.gaps)]
    if not fitting:
        sizes = ", ".join(map(repr, gapped.gaps))
        raise UnspoolError(
            f"no candidate has the requested length ({sizes}); allow other lengths: gap(1, 8)"
        )
    check_fits(max(len(row.ids) for row in fitting), lm.context, lm.config.context)
    shared = _shared(fitting)
    if not shared:
        raise UnspoolError("this model has no start token; put some words before the first gap")
    scored_rows = score_rows(lm, [row.ids for row in fitting], shared, top)
    return rank_candidates(
        [row.filled(steps) for row, steps in zip(fitting, scored_rows, strict=True)]
    )


def _shared(rows: Sequence[_CandidateText]) -> int:
    """Number of common first tokens that do not overlap a gap: gap tokens are always scored,
    even if all candidates start alike."""
    return min([shared_length([row.ids for row in rows]), *(row.places[0].start for row in rows)])


@dataclass(frozen=True, slots=True)
class _CandidateText:
    """A filled text and its tokens."""

    inside: Inside
    text: str  # the whole text
    ids: list[int]  # up to the last scored token
    ends: list[int]  # byte offset of the end of each token
    spans: list[tuple[int, int]]  # byte ranges of the gaps

    @classmethod
    def build(
        cls, lm: Session, gapped: GappedText, inside: Inside, reach: int | None
    ) -> _CandidateText:
        first = gapped.first(len(inside))
        scored_suffix = truncate_text(lm, first.texts[-1], reach)
        text = replace(first, texts=(*first.texts[:-1], scored_suffix)).filled(inside)
        ids = text_ids(lm, text)
        ends = token_ends(lm, ids, text)
        if not scored_suffix and lm.tokenizer.eos_id is not None:  # the text ends after the gap
            ids.append(lm.tokenizer.eos_id)
            ends.append(ends[-1])
        spans, at = list[tuple[int, int]](), 0
        for before, between in zip(first.texts, inside, strict=False):
            begin = at + len(before.encode())
            at = begin + len(between.encode())
            spans.append((begin, at))
        return cls(inside, first.filled(inside), ids, ends, spans)

    @property
    def places(self) -> list[range]:
        """Token ranges that overlap each gap."""
        return [tokens_within(self.ends, *span) for span in self.spans]

    def fits(self, gaps: Sequence[Gap]) -> bool:
        pairs = zip(self.places, gaps, strict=False)
        return all(gap.least <= len(places) <= gap.most for places, gap in pairs)

    def filled(self, steps: Sequence[Step]) -> Filled:
        """Build the result from the scored steps."""
        first = len(self.ids) - len(steps)
        parts = [
            clip_steps(
                steps[place.start - first : place.stop - first],
                self.ends[place.start : place.stop],
                *span,
            )
            for place, span in zip(self.places, self.spans, strict=True)
        ]
        score = math.fsum(step.logprob for step in steps)
        return Filled(self.inside, self.text, score, tuple(steps), tuple(parts))
