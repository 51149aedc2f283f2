"""Bits per byte of held-out text, and log-likelihoods of continuations in batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspool.errors import SettingsError
from unspool.progress import progress_bar
from unspool.sampling import score
from unspool.session import Session
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.prepared import PreparedData
from unspool.train.data.sources import documents
from unspool.train.running.runs import Run

# -- Log-likelihoods of continuations in batches, the basis of bits per byte and lm-eval
#
#     results = likelihoods(lm, [(context_ids, target_ids), ...])
#     results[0].logprobs, results[0].greedy
#
# A context with several continuations (a question and its four answers) is prefilled once.

_MAX_LOGIT_ROWS = 1024  # per step: bounds the memory
_MAX_GROUP = 32  # continuations in a batch
_MAX_GROUP_TOKENS = 32_768

Pair = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Log-probabilities of one continuation, and whether greedy decoding would yield it."""

    logprobs: tuple[float, ...]
    greedy: bool

    @property
    def total(self) -> float:
        return sum(self.logprobs)


def score_continuations(
    lm: Session, pairs: Sequence[Pair], on_progress: Callable[[int], object] = lambda done: None
) -> list[Likelihood]:
    """Score each target after its context, in the given order.

    A context that is too long is truncated at its start; it needs at least one token.
    `on_progress` is called with the number of scored pairs.
    """
    for context, _ in pairs:
        if not context:
            raise SettingsError("a continuation needs at least one context token")
    results: dict[int, Likelihood] = {number: Likelihood((), True) for number in range(len(pairs))}
    pending = [
        _Continuation(number, *_truncate(pair, lm.context))
        for number, pair in enumerate(pairs)
        if pair[1]
    ]
    done = len(pairs) - len(pending)
    # Sorted by tokens, so that equal prefixes are in one batch; long ones first.
    pending.sort(key=lambda item: (-len(item.context) // 512, item.context, item.target))
    for group in _groups(pending):
        _score_group(lm, group)
        results.update({item.number: item.likelihood() for item in group})
        done += len(group)
        on_progress(done)
    return [results[number] for number in range(len(pairs))]


class _Continuation:
    """A continuation that is being scored."""

    def __init__(self, number: int, context: list[int], target: list[int]) -> None:
        self.number, self.context, self.target = number, context, target
        self.logprobs: list[float] = []
        self.greedy = True

    @property
    def num_remaining(self) -> int:
        return len(self.target) - len(self.logprobs)

    def next_tokens(self, count: int) -> list[int]:
        """Inputs for the next `count` targets: the token before each of them."""
        done = len(self.logprobs)
        return self.target[max(done - 1, 0) : done + count - 1]

    def likelihood(self) -> Likelihood:
        return Likelihood(tuple(self.logprobs), self.greedy)


def _truncate(pair: Pair, max_context: int) -> tuple[list[int], list[int]]:
    context, target = list(pair[0]), list(pair[1])
    room = max_context + 1 - len(target)  # the last target is not an input
    if room < 1:
        raise SettingsError(
            f"a continuation has {len(target):,} tokens, more than the model's context of "
            f"{max_context:,}"
        )
    return context[-room:], target


def _groups(items: Sequence[_Continuation]) -> Iterator[list[_Continuation]]:
    group: list[_Continuation] = []
    tokens = 0
    for item in items:
        size = len(item.context) + len(item.target)
        if group and (len(group) == _MAX_GROUP or tokens + size > _MAX_GROUP_TOKENS):
            yield group
            group, tokens = [], 0
        group.append(item)
        tokens += size
    if group:
        yield group


def _score_group(lm: Session, group: Sequence[_Continuation]) -> None:
    """Score a group as one batch of branches, in chunks that bound the memory of the logits."""
    engine = lm.engine
    with ExitStack() as stack:
        _prefill_shared(lm, group, stack)
        branches = [stack.enter_context(lm.open_branch(item.context)) for item in group]
        while True:
            active = [pair for pair in zip(group, branches, strict=True) if pair[0].num_remaining]
            if not active:
                return
            rows = max(1, _MAX_LOGIT_ROWS // len(active))
            counts = [min(rows, item.num_remaining) for item, _ in active]
            additions = [
                (branch, item.next_tokens(count))
                for (item, branch), count in zip(active, counts, strict=True)
            ]
            logits = engine.extend_all(additions, num_logits=max(counts))
            for (item, _), count, item_logits in zip(active, counts, logits, strict=True):
                done = len(item.logprobs)
                scores = score(item_logits[-count:], item.target[done : done + count])
                item.logprobs += scores.logprobs.tolist()
                item.greedy = item.greedy and not scores.ranks.any()


def _prefill_shared(lm: Session, group: Sequence[_Continuation], stack: ExitStack) -> None:
    """Prefill contexts with several continuations once; their branches hit the prefix cache."""
    counts = Counter(tuple(item.context) for item in group)
    shared = sorted(context for context, count in counts.items() if count > 1)
    branches = [stack.enter_context(lm.open_branch(context)) for context in shared]
    if branches:
        lm.engine.extend_all([(branch, ()) for branch in branches])


def source_texts(
    source: Sequence[str], *, field: str | None = None, limit: int | None = None
) -> Iterator[str]:
    """Yield the documents of a source as texts; the parts of a long one are joined."""
    parts: list[str] = []
    done = 0
    for document in documents(list(source), field=field):
        parts.append(_document_text(document))
        if document.is_end:
            yield "".join(parts)
            parts, done = [], done + 1
        if limit is not None and done >= limit:
            return
    if parts:
        yield "".join(parts)


def _document_text(document: Any) -> str:
    if document.text is not None:
        return str(document.text)
    if document.pieces is not None:
        return "".join(text for text, _ in document.pieces)
    raise SettingsError(
        "bits per byte need plain text, not conversations, which are partly written by a template"
    )


def held_out_texts(run: Run, *, limit: int | None = None) -> Iterator[str]:
    """Yield the held-out texts of a run."""
    folder = Path(str(run.facts.get("data", {}).get("folder", "")))
    if not (folder / "card.json").exists():
        raise SettingsError(
            f"the data of {run.name} is not on this machine; give a text with --data"
        )
    packed = PreparedData.open(folder).held_out
    vocabulary = run.folder / "tokenizer"
    tokenizer = Tokenizer.from_file(vocabulary if vocabulary.exists() else run.model or run.folder)
    for number in range(min(packed.num_documents, limit or packed.num_documents)):
        start, end = packed.offsets[number], packed.offsets[number + 1]
        yield tokenizer.decode(map(int, packed.ids[start:end]), specials=False)


@dataclass(frozen=True, slots=True)
class BitsPerByte:
    """Negative log-likelihood of texts, in nats, and their size."""

    nats: float
    bytes: int
    tokens: int
    documents: int

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes

    @property
    def loss(self) -> float:
        """Nats per token, as in the training log."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.tokens

    def to_dict(self) -> dict[str, float]:
        return {
            "bits_per_byte": self.bits_per_byte, "loss": self.loss, "perplexity": self.perplexity,
            "bytes": self.bytes, "tokens": self.tokens, "documents": self.documents,
        }  # fmt: skip


def bits_per_byte(
    lm: Session,
    texts: Iterable[str],
    *,
    context: int | None = None,
    stride: int | None = None,
    progress: bool = True,
) -> BitsPerByte:
    """Score texts, each on its own after the token that starts a text.

    Args:
        context: Window size in tokens; by default the model's context.
        stride: Tokens scored in each window after the first; by default half the context.
    """
    width = min(context or lm.context, lm.context)
    stride = stride if stride is not None else max(1, width // 2)
    if not 1 <= stride <= width:
        raise SettingsError(f"stride must be from 1 to {width} (the context), got {stride}")
    lead = leading_token(lm)
    pairs: list[Pair] = []
    size = documents = 0
    for text in texts:
        if not text:
            continue
        ids = lm.tokenizer.encode(text)
        size += len(text.encode())
        if lead is None:  # the first token has no context and is not scored
            size -= len(lm.tokenizer.decode_bytes(ids[:1]))
        pairs += windows(ids if lead is None else [lead, *ids], width, stride)
        documents += 1
    if not pairs:
        raise SettingsError("there is no text to evaluate: the data is empty")
    with progress_bar("evaluating", len(pairs), show=progress) as on_progress:
        results = score_continuations(lm, pairs, on_progress)
    tokens = sum(len(result.logprobs) for result in results)
    return BitsPerByte(-sum(result.total for result in results), size, tokens, documents)


def leading_token(lm: Session) -> int | None:
    """The token before a text: BOS, or else EOS, because texts follow each other in training."""
    tokenizer = lm.tokenizer
    if tokenizer.bos_id is not None and (tokenizer.add_bos or tokenizer.eos_id is None):
        return tokenizer.bos_id
    return tokenizer.eos_id


def windows(ids: Sequence[int], width: int, stride: int) -> list[Pair]:
    """(context, targets) of each window; every token but the first is a target once.

    The first window scores all its tokens, the others `stride` tokens after the overlap.
    """
    pairs: list[Pair] = []
    done = 1
    while done < len(ids):
        end = min(len(ids), done + (width if done == 1 else stride))
        start = max(0, end - 1 - width)  # the last target is not an input
        pairs.append((ids[start:done], ids[done:end]))
        done = end
    return pairs
