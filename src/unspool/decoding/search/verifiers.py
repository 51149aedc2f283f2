"""Verifiers score texts: by log-probability, votes, functions, questions to a model, rewards."""

from __future__ import annotations

import math
import queue
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from unspool.backends.step import Floats, Logits
from unspool.decoding.branches import HeldBranches, mean_logprob
from unspool.decoding.search.tree import TokenBudget
from unspool.engine.generation import Generation
from unspool.engine.results import Step
from unspool.engine.tree import Branch
from unspool.errors import SettingsError, UnspoolError
from unspool.model.files.checkpoint import ScoreHead, read_score_head
from unspool.sampling.arrays import array_operations
from unspool.sampling.chain import log_softmax
from unspool.session import Session

# -- Extract answers from texts and count them, with equal or weighted votes

Extract = str | re.Pattern[str] | Callable[[Generation], Hashable | None]
Find = Callable[[Generation], Hashable | None]


def answer_finder(extract: Extract) -> Find:
    """Build the function that extracts a text's answer: the caller's, or the last match of a
    pattern (its first group, if any). It returns None if the text has no answer."""
    if callable(extract):
        return lambda text: _call_extract(extract, text)
    try:
        pattern = re.compile(extract)
    except (re.error, TypeError) as error:
        raise SettingsError(f"extract is not a valid pattern: {error}") from error

    def last_match(text: Generation) -> str | None:
        matches = list(pattern.finditer(text.text))
        answer = matches[-1][1 if pattern.groups else 0] if matches else None
        return None if answer is None else answer.strip()

    return last_match


def _call_extract(
    extract: Callable[[Generation], Hashable | None], text: Generation
) -> Hashable | None:
    try:
        answer = extract(text)
        hash(answer)  # answers are dictionary keys
    except Exception as error:
        raise UnspoolError(f"extract raised {type(error).__name__}: {error}") from error
    return answer


_ANSWER_PATTERNS = (
    re.compile(r"\\boxed\{([^{}]*)\}"),
    re.compile(r"####\s*(\S.*)"),  # as GSM8K ends its answers
    re.compile(r"(?i)\banswer\s*(?:is|:|=)\s*\**\s*([^\n]*[^\s.*])"),
    re.compile(r"-?\d[\d,]*(?:\.\d+)?"),
)


def final_answer(text: Generation) -> str | None:
    """Default answer extraction: a boxed answer, the text after "answer is" or ####, else the last
    number, else the last line."""
    for pattern in _ANSWER_PATTERNS:
        if matches := list(pattern.finditer(text.text)):
            answer = matches[-1][1 if pattern.groups else 0].strip().rstrip(".")
            number = answer.lstrip("$").replace(",", "")
            return number if re.fullmatch(r"-?\d+(\.\d+)?", number) else answer
    lines = text.text.split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), None)


def tally(
    texts: Sequence[Generation],
    answers: Sequence[Hashable | None],
    weights: Sequence[float] | None = None,
) -> dict[Hashable, float]:
    """Votes per answer, highest first; texts without an answer do not vote. Ties go to the answer
    with the likeliest text."""
    votes: dict[Hashable, float] = defaultdict(float)
    likeliest: dict[Hashable, float] = {}
    vote_weights = [1.0] * len(texts) if weights is None else weights
    for text, answer, weight in zip(texts, answers, vote_weights, strict=True):
        if answer is not None:
            votes[answer] += weight
            likeliest[answer] = max(likeliest.get(answer, -float("inf")), mean_logprob(text))
    order = sorted(votes, key=lambda answer: (-votes[answer], -likeliest[answer]))
    return {answer: votes[answer] for answer in order}


# -- Verifiers score texts: the protocol, and the verifiers that need no other model


_MAX_LOGITS = 2**25  # per batch: bounds memory use on long texts


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of scoring one text."""

    score: float | None  # higher is better; None: scoring failed, and the text loses
    why: str = ""  # explanation, or the reason of a failure
    answer: Hashable | None = None  # extracted answer, for votes


@runtime_checkable
class Verifier(Protocol):
    """Scores texts; higher is better."""

    @property
    def partial(self) -> bool:
        """Whether it can score an unfinished text."""

    def score(self, texts: Sequence[Generation]) -> list[Verdict]:
        """Return one verdict per text."""

    def cost(self, texts: Sequence[Generation]) -> int:
        """Upper bound of the tokens its model computes for these texts; 0 without a model."""


@runtime_checkable
class Cancellable(Protocol):
    """A verifier that can be stopped early, from any thread; its verdicts are then ignored."""

    def cancel(self) -> None: ...


class LogprobVerifier:
    """Mean log-probability per token, by the model that wrote the text."""

    partial = True

    def score(self, texts: Sequence[Generation]) -> list[Verdict]:
        return [Verdict(mean_logprob(text)) if text.steps else _EMPTY for text in texts]

    def cost(self, texts: Sequence[Generation]) -> int:
        return 0


class CertaintyVerifier:
    """Self-certainty (Kang et al. 2025): KL(uniform || p) in nats, averaged over the tokens.

    Needs one more forward pass over the text."""

    partial = True

    def __init__(self, lm: Session) -> None:
        self._lm = lm

    def score(self, texts: Sequence[Generation]) -> list[Verdict]:
        rows = max(1, _MAX_LOGITS // self._lm.vocab_size)
        verdicts: list[Verdict] = []
        group: list[Generation] = []
        for text in texts:
            if group and len(text.steps) + sum(len(queued.steps) for queued in group) > rows:
                verdicts += self._score_batch(group, rows)
                group = []
            group.append(text)
        return verdicts + self._score_batch(group, rows)

    def cost(self, texts: Sequence[Generation]) -> int:
        return sum(len(text.steps) for text in texts)  # the prompt is cached

    def _score_batch(self, texts: Sequence[Generation], rows: int) -> list[Verdict]:
        """Score texts in one batch; a single long text is read in chunks of `rows` tokens."""
        totals = [0.0] * len(texts)
        with ExitStack() as stack:
            inputs = [
                (number, text.tokens, stack.enter_context(self._open(text)))
                for number, text in enumerate(texts)
                if text.steps
            ]
            for start in range(0, max((len(tokens) for _, tokens, _ in inputs), default=0), rows):
                active = [item for item in inputs if len(item[1]) > start]
                ends = [min(start + rows, len(tokens)) for _, tokens, _ in active]
                parts = [  # the logits of a token come from the position before it
                    (branch, tokens[max(0, start - 1) : end - 1])
                    for (_, tokens, branch), end in zip(active, ends, strict=True)
                ]
                num_logits = [end - start for end in ends]
                logits_rows = self._lm.engine.extend_all(parts, num_logits=num_logits)
                for (number, _, _), logits in zip(active, logits_rows, strict=True):
                    totals[number] += _kl_from_uniform(logits)
        return [
            Verdict(total / len(text.steps)) if text.steps else _EMPTY
            for text, total in zip(texts, totals, strict=True)
        ]

    def _open(self, text: Generation) -> AbstractContextManager[Branch]:
        request = text.request
        return self._lm.open_branch(text.prompt, request.adapter, request.branch_interventions())


def _kl_from_uniform(logits: Logits) -> float:
    """KL(uniform || p) in nats, summed over rows of logits."""
    means = array_operations(logits).to_numpy(log_softmax(logits).mean(-1)).astype(np.float64)
    return float(np.sum(-means - math.log(logits.shape[-1])))


class VoteVerifier:
    """Self-consistency (Wang et al. 2022): the share of texts that give the same answer. With
    `weigher`, each vote is weighted by that verifier's score."""

    def __init__(self, extract: Extract = final_answer, weigher: Verifier | None = None) -> None:
        self._find, self.weigher = answer_finder(extract), weigher

    @property
    def partial(self) -> bool:
        return False  # the answer comes last

    def score(self, texts: Sequence[Generation]) -> list[Verdict]:
        weights_by = self.weigher.score(texts) if self.weigher else [Verdict(1.0)] * len(texts)
        weights = _weights([verdict.score for verdict in weights_by])
        extracted = self.answers(texts)
        answers = [result.answer for result in extracted]
        votes = tally(texts, answers, weights)
        total = math.fsum(votes.values()) or 1.0
        return [
            Verdict(None, result.why or "no answer was found in it") if result.answer is None
            else verdict if verdict.score is None
            else Verdict(votes[result.answer] / total, verdict.why, result.answer)
            for result, verdict in zip(extracted, weights_by, strict=True)
        ]  # fmt: skip

    def answers(self, texts: Sequence[Generation]) -> list[Verdict]:
        """Extract each text's answer; without one, the verdict has the reason."""
        return [Verdict(None, answer=self._find(text)) for text in texts]

    def cost(self, texts: Sequence[Generation]) -> int:
        return self.weigher.cost(texts) if self.weigher else 0

    def cancel(self) -> None:
        """Cancel the verifier that weighs the votes."""
        if isinstance(self.weigher, Cancellable):
            self.weigher.cancel()


def checked(returned: Any) -> Verdict:
    """Validate what a verifier returned for one text."""
    verdict = returned if isinstance(returned, Verdict) else Verdict(returned)
    if verdict.score is None:
        return verdict if verdict.why else Verdict(None, "the verifier gave no score")
    try:
        score = float(verdict.score)
        hash(verdict.answer)
    except (TypeError, ValueError):
        return Verdict(None, f"the verifier gave {returned!r}; it must give a number")
    if not math.isfinite(score):
        return Verdict(None, f"the verifier gave {score}; it must give a finite number")
    return Verdict(score, str(verdict.why), verdict.answer)


def _weights(scores: Sequence[float | None]) -> list[float]:
    """Vote weights from scores: unchanged if none is negative, else exp(score) (log-probabilities),
    so that a better text weighs more and each weighs something."""
    valid = [score for score in scores if score is not None]
    if min(valid, default=0.0) >= 0:
        return [score or 0.0 for score in scores]
    best = max(valid)
    return [0.0 if score is None else math.exp(score - best) for score in scores]


_EMPTY = Verdict(None, "the text has no tokens to score")


# -- Runs a verifier within the budget; its failures only fail the texts they concern


_PROBE = 16  # tokens of the dummy text that the cost per token is measured with


class VerifierRunner:
    """Calls a verifier and estimates what it costs."""

    def __init__(self, judge: Verifier, budget: TokenBudget, start: Generation) -> None:
        self.verifier, self._budget = judge, budget
        self._base, self._slope = self._measure_cost(start)

    def cancel(self) -> None:
        """Stop the verifier if it supports that."""
        if isinstance(self.verifier, Cancellable):
            self.verifier.cancel()

    def estimate_cost(self, length: int) -> int:
        """Estimated cost in tokens of scoring a text of `length` tokens."""
        return self._base + self._slope * length

    def score(self, texts: Sequence[Generation]) -> list[Verdict]:
        """Score all texts in one call if that works and the budget allows, else one by one."""
        try:
            cost = self.verifier.cost(texts)
            if cost <= self._budget.remaining:
                self._budget.reserve("judged", cost)
                verdicts = self.verifier.score(texts)
                if len(verdicts) == len(texts):
                    return [checked(verdict) for verdict in verdicts]
                why = f"the verifier gave {len(verdicts)} verdicts for {len(texts)} texts"
            else:
                why = "no budget was left to score it"
        except Exception as error:
            why = f"the verifier raised {type(error).__name__}: {error}"
        if len(texts) == 1:
            return [Verdict(None, why)]
        return [self.score([text])[0] for text in texts]

    def _measure_cost(self, start: Generation) -> tuple[int, int]:
        """Cost of an empty text, and of each further token."""
        last = start.prompt[-1]
        step = Step(last, b" a", " a", 0.0, len(start.prompt))
        try:
            base = self.verifier.cost([start])
            longer = self.verifier.cost([replace(start, steps=[step] * _PROBE)])
        except Exception:
            return 0, 0  # the error is reported when texts are scored
        if longer <= 0:
            return 0, 0
        return base, max(1, -(-(longer - base) // _PROBE))


# -- A function as a verifier: `lm.think(prompt, judge=lambda text: -len(text.text))`


TIMEOUT_S = 60.0  # per text


class FunctionVerifier:
    """A function of a `Generation` that returns a number, a bool or a `Verdict`.

    seconds    timeout per text.
    partial    whether it can score unfinished texts.
    """

    def __init__(
        self,
        function: Callable[[Generation], Any],
        *,
        seconds: float = TIMEOUT_S,
        partial: bool = True,
    ) -> None:
        self._function, self._seconds, self.partial = function, seconds, partial

    def cost(self, texts: Sequence[Generation]) -> int:
        """Zero: the function's cost is not counted."""
        return 0

    def score(self, texts: Sequence[Generation]) -> list[Verdict]:
        verdicts: list[Verdict] = []
        while len(verdicts) < len(texts):
            verdicts += self._score_until_timeout(texts[len(verdicts) :])
        return verdicts

    def _score_until_timeout(self, texts: Sequence[Generation]) -> list[Verdict]:
        """Score texts up to the end or the first timeout."""
        results: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
        abandoned = threading.Event()

        def work() -> None:
            for text in texts:
                if abandoned.is_set():  # timed out: the results are ignored
                    return
                results.put(self._score_text(text))

        threading.Thread(target=work, name="unspool-judge", daemon=True).start()
        verdicts: list[Verdict] = []
        try:
            for _ in texts:
                verdicts.append(results.get(timeout=self._seconds))
        except queue.Empty:
            verdicts.append(
                Verdict(None, f"the verifier did not answer within {self._seconds:g} s")
            )
        finally:
            abandoned.set()
        return verdicts

    def _score_text(self, text: Generation) -> Verdict:
        try:
            return checked(self._function(text))
        except BaseException as error:  # SystemExit too: it must not end more than this thread
            return Verdict(None, f"the verifier raised {type(error).__name__}: {error}")


def as_verifier(verifier: Verifier | Callable[[Generation], Any]) -> Verifier:
    """Return a verifier; a function of a text is wrapped."""
    if isinstance(verifier, Verifier) and not isinstance(verifier, type):
        return verifier
    if callable(verifier):
        return FunctionVerifier(verifier)
    raise SettingsError(
        f"judge must be a name such as 'logprob', a verifier, or a function that returns a number "
        f"for a Generation (higher is better), got {verifier!r}"
    )


# -- Input of a verifier's model: the question and the text in its own tokens


Messages = Sequence[Mapping[str, Any]]
_BATCH_SIZE = 16  # texts


@dataclass(slots=True)
class Reader:
    """A model that reads texts written by another model or by itself.

    `conversation` has the messages that the texts answer; without it, the prompt's text is used as
    one message.
    """

    lm: Session  # the reading model
    writer: Session
    conversation: Messages | None = None
    _cached_rows: list[Sequence[int]] = field(
        default_factory=list
    )  # rows in its prefix cache, most recent last

    @property
    def is_writer(self) -> bool:
        """Whether it reads its own texts."""
        return self.lm.engine is self.writer.engine

    def plain(self, text: Generation) -> list[int]:
        """Prompt and text without a template."""
        if self.is_writer or not self._has_tokenizer(self.lm):
            return [*text.prompt, *text.tokens]
        return self.lm.tokenizer.encode_prompt(self.prompt_of(text) + text.text)

    def messages(self, text: Generation) -> list[Mapping[str, Any]]:
        """The conversation, with the text as the last answer."""
        conversation = self.conversation or [{"role": "user", "content": self.prompt_of(text)}]
        return [*conversation, {"role": "assistant", "content": text.text}]

    def prompt_of(self, text: Generation) -> str:
        """The prompt's text without control tokens."""
        return self.writer.tokenizer.decode(text.prompt, specials=False)

    def fits(self, row: Sequence[int]) -> bool:
        """Whether the row fits the model's context."""
        return 0 < len(row) <= self.lm.context

    @staticmethod
    def _has_tokenizer(lm: Session) -> bool:
        return lm._tokenizer is not None

    # -- sharing common prefixes ---------------------------------------------------------------

    def cost(self, rows: Sequence[Sequence[int]]) -> int:
        """Upper bound of the tokens computed for these rows, minus shared pages."""
        cached_rows, total = list(self._cached_rows), 0
        for number, row in enumerate(rows):
            total += len(row) - self._shared(row, cached_rows)
            if number == 0:
                cached_rows.append(row)
        return total

    def mark_cached(self, row: Sequence[int]) -> None:
        """Record that these tokens are in the prefix cache."""
        self._cached_rows = [*self._cached_rows[-63:], row]

    def batches(self, count: int) -> Iterator[range]:
        """Row ranges per batch; the first row runs alone, so that the others share its prefix."""
        if count:
            yield range(1)
        for start in range(1, count, _BATCH_SIZE):
            yield range(start, min(start + _BATCH_SIZE, count))

    def _shared(self, row: Sequence[int], cached_rows: Sequence[Sequence[int]]) -> int:
        """Number of cached tokens of a row: whole pages, and never its last token."""
        page = self.lm.engine.tree.page_size
        longest = max((_common_length(row, other) for other in cached_rows), default=0)
        return min(longest, len(row) - 1) // page * page


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    length = min(len(first), len(second))
    for index in range(length):
        if first[index] != second[index]:
            return index
    return length


# -- Ask a causal model whether a text is correct: P(yes) / (P(yes) + P(no))


QUESTION = "Is the answer above correct and complete? Reply with yes or no."
_PLAIN = "\n\nQuestion: {question}\nAnswer:"
_YES, _NO = ("Yes", "yes", " Yes", " yes"), ("No", "no", " No", " no")


class AskVerifier:
    """P(yes) of a model that is asked about a text.

    model         the model to ask; by default the one that wrote the text.
    question      a yes-or-no question.
    conversation  the messages that the texts answer, if the prompt is not one message.
    """

    partial = True

    def __init__(
        self,
        lm: Session,
        model: Session | None = None,
        *,
        question: str = QUESTION,
        conversation: Messages | None = None,
    ) -> None:
        (model or lm).config.require_head()
        self._reader, self._question = Reader(model or lm, lm, conversation), question
        self._yes, self._no = yes_no_tokens(self._reader.lm)
        self._turn = self._next_turn()

    def cost(self, texts: Sequence[Generation]) -> int:
        """Tokens that the model computes, at most."""
        return self._reader.cost(self._rows(texts))

    def score(self, texts: Sequence[Generation]) -> list[Verdict]:
        reader, rows = self._reader, self._rows(texts)
        fitting = [number for number, row in enumerate(rows) if reader.fits(row)]
        why = (
            f"the text and the question exceed the verifier's context of {reader.lm.context} tokens"
        )
        verdicts = [Verdict(None, why)] * len(rows)
        for batch in reader.batches(len(fitting)):
            numbers = [fitting[position] for position in batch]
            with HeldBranches(reader.lm.engine, reader.lm.adapter) as tracker:
                branches = [tracker.open(rows[number]) for number in numbers]
                logits = reader.lm.engine.extend_all([(branch, ()) for branch in branches])
            for number, row in zip(numbers, logits, strict=True):
                verdicts[number] = Verdict(probability_yes(row, self._yes, self._no))
                reader.mark_cached(rows[number])
        return verdicts

    # -- building the rows ---------------------------------------------------------------------

    def _rows(self, texts: Sequence[Generation]) -> list[list[int]]:
        for text in texts if self._reader.is_writer else ():
            self._reader.mark_cached([*text.prompt, *text.tokens[:-1]])  # cached by the search
        return [self._row(text) for text in texts]

    def _row(self, text: Generation) -> list[int]:
        reader, lm = self._reader, self._reader.lm
        if not reader.is_writer:
            return self._full_conversation(text)
        if not self._is_chat(text):
            return [
                *self._without_end(text),
                *lm.tokenizer.encode(_PLAIN.format(question=self._question)),
            ]
        if self._turn is None:
            return self._full_conversation(text)
        return [*self._without_end(text), *self._turn]

    def _full_conversation(self, text: Generation) -> list[int]:
        """The whole conversation in the model's own template."""
        reader, lm = self._reader, self._reader.lm
        if lm.is_instruct:
            turn = {"role": "user", "content": self._question}
            return lm.chat_template.encode([*reader.messages(text), turn]).ids
        document = reader.prompt_of(text) + text.text + _PLAIN.format(question=self._question)
        return lm.tokenizer.encode_prompt(document)

    def _without_end(self, text: Generation) -> list[int]:
        """Prompt and text without an end token; the next turn contains it."""
        tokens = text.tokens
        if tokens and tokens[-1] in self._reader.lm.end_ids:
            tokens = tokens[:-1]
        return [*text.prompt, *tokens]

    def _is_chat(self, text: Generation) -> bool:
        """Whether the prompt came from the chat template: only that writes control tokens."""
        lm = self._reader.lm
        marks = lm.tokenizer.special_ids - {lm.tokenizer.bos_id}
        return lm.is_instruct and not marks.isdisjoint(text.prompt)

    def _next_turn(self) -> list[int] | None:
        """Tokens that the template puts between an answer and the next answer; None if it rewrites
        earlier turns."""
        lm = self._reader.lm
        if not (self._reader.is_writer and lm.is_instruct):
            return None
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "."},
            {"role": "user", "content": self._question},
        ]
        return lm.chat_template.encode_after(messages, 1)


def yes_no_tokens(lm: Session) -> tuple[frozenset[int], frozenset[int]]:
    """Tokens that answers of yes and of no start with. Raises if they share one."""
    yes, no = first_tokens(lm, _YES), first_tokens(lm, _NO)
    if not yes or not no or yes & no:
        raise SettingsError(
            "in this model's vocabulary yes and no start with the same token, so it cannot be "
            "asked; use another verifier"
        )
    return yes, no


def probability_yes(logits: Logits, yes: frozenset[int], no: frozenset[int]) -> float:
    """P(yes) / (P(yes) + P(no)) from the logits of the answer's first token, [n, V]; the last row
    counts."""
    logprobs = array_operations(logits).to_numpy(log_softmax(logits))[-1].astype(np.float64)
    yes_mass, no_mass = (float(np.exp(logprobs[sorted(ids)]).sum()) for ids in (yes, no))
    return yes_mass / (yes_mass + no_mass) if yes_mass + no_mass > 0 else 0.5


def first_tokens(lm: Session, words: Sequence[str]) -> frozenset[int]:
    """First tokens of these words; words that are a single token are preferred."""
    encoded = [lm.tokenizer.encode(word) for word in words]
    single_tokens = frozenset(ids[0] for ids in encoded if len(ids) == 1)
    return single_tokens or frozenset(ids[0] for ids in encoded[:2] if ids)


# -- A reward model as a verifier: a sequence-classification checkpoint whose head scores a
# text


_STEP_TOKEN = "<extra_0>"  # step separator of Qwen's process reward models
_GATHER: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "last": lambda scores: scores[-1],
    "mean": lambda scores: math.fsum(scores) / len(scores),
    "product": math.prod,
}
RewardRow = tuple[list[int], list[int]]  # tokens, and the positions to score


class RewardVerifier:
    """Score of a reward model.

    process       score the end of each step, not only of the text; default: by the model's head.
    gather        how step scores are combined: min, last, mean or product.
    step          the string that ends a step.
    conversation  the messages that the texts answer, if the prompt is not one message.
    """

    def __init__(
        self,
        lm: Session,
        model: Session,
        *,
        process: bool | None = None,
        gather: Literal["min", "last", "mean", "product"] = "min",
        step: str = "\n\n",
        conversation: Messages | None = None,
    ) -> None:
        if model.path is None:
            raise SettingsError(
                "the reward model was not loaded from a folder, so its head is not available"
            )
        if gather not in _GATHER:
            raise SettingsError(f"gather must be one of {', '.join(_GATHER)}, got {gather!r}")
        if not step:
            raise SettingsError(
                "step must be the string that ends a step, such as two newlines; it is empty"
            )
        self._head: ScoreHead = read_score_head(model.path)
        if self._head.labels > 2:
            raise SettingsError(
                f"{model.path.name} has {self._head.labels} labels; a reward model has one, or two "
                "of which the second means good"
            )
        self.partial = self._head.per_token if process is None else process
        self._reader = Reader(model, lm, conversation)
        self._gather, self._step = _GATHER[gather], step
        self._cached_scores: dict[tuple[int, ...], float] = {}

    def cost(self, texts: Sequence[Generation]) -> int:
        """Tokens that the model computes, at most."""
        return self._reader.cost(
            [row for row, _ in map(self._row, texts) if self._is_unscored(row)]
        )

    def score(self, texts: Sequence[Generation]) -> list[Verdict]:
        rows = [self._row(text) for text in texts]
        self._read([row for row in rows if self._is_unscored(row[0]) and self._reader.fits(row[0])])
        return [self._verdict(*row) for row in rows]

    def _verdict(self, row: list[int], positions: list[int]) -> Verdict:
        if not self._reader.fits(row):
            return Verdict(
                None,
                f"{len(row)} tokens exceed the reward model's context of {self._reader.lm.context}",
            )
        scores = [self._cached_scores[tuple(row[: position + 1])] for position in positions]
        if not all(map(math.isfinite, scores)):
            return Verdict(None, "the reward model returned no finite number")
        listed = " ".join(f"{score:.3f}" for score in scores)
        return Verdict(self._gather(scores), f"steps: {listed}" if self.partial else "")

    def _is_unscored(self, row: list[int]) -> bool:
        return tuple(row) not in self._cached_scores

    # -- building the rows ---------------------------------------------------------------------

    def _row(self, text: Generation) -> RewardRow:
        reader = self._reader
        if self.partial and text.text and reader.lm._tokenizer is not None:
            return self._in_steps(text)
        if reader.lm.is_instruct:
            template = reader.lm.chat_template
            row = template.encode(reader.messages(text), add_generation_prompt=False).ids
        else:
            row = reader.plain(text)
        return row, [len(row) - 1]

    def _in_steps(self, text: Generation) -> RewardRow:
        """Encode each step separately, so that tokens do not cross step boundaries."""
        reader, lm = self._reader, self._reader.lm
        if lm.is_instruct:
            row = list(lm.chat_template.encode(reader.messages(text)[:-1]).ids)
        else:
            row = lm.tokenizer.encode_prompt(reader.prompt_of(text))
        mark = lm.tokenizer.special_tokens.get(_STEP_TOKEN)
        positions: list[int] = []
        for piece in _pieces(text.text, self._step):
            row += (
                lm.tokenizer.encode(piece)
                if mark is None
                else lm.tokenizer.encode(piece.removesuffix(self._step))
            )
            row += [] if mark is None else [mark]
            positions.append(len(row) - 1)
        return row, positions

    def _read(self, rows: Sequence[RewardRow]) -> None:
        lm, reader = self._reader.lm, self._reader
        lm.config.require_causal()
        for batch in reader.batches(len(rows)):
            group = [rows[number] for number in batch]
            with HeldBranches(lm.engine, lm.adapter) as tracker:
                branches = [tracker.open(row) for row, _ in group]
                unscored = [frozenset(self._unscored(*row)) for row in group]
                observations = lm.engine.look_all(
                    [(branch, ()) for branch in branches], at=unscored
                )
            for row, positions, observation in zip(
                (row for row, _ in group), unscored, observations, strict=True
            ):
                vectors = [inside.residuals[-1] for inside in observation.inside
                           if inside.residuals is not None]  # fmt: skip
                scores = self._scores(lm.model.normed(np.concatenate(vectors)))
                for position, score in zip(sorted(positions), scores, strict=True):
                    self._cached_scores[tuple(row[: position + 1])] = score
                reader.mark_cached(row)

    def _unscored(self, row: list[int], positions: list[int]) -> list[int]:
        return [
            position
            for position in positions
            if tuple(row[: position + 1]) not in self._cached_scores
        ]

    def _scores(self, vectors: Floats) -> list[float]:
        """One score per row: with two labels the probability of the second; with one label its
        sigmoid for steps, the raw value for whole texts."""
        outputs = self._head(vectors).astype(np.float64)
        if self._head.labels == 2:
            logits = outputs[:, 1] - outputs[:, 0]
        else:
            logits = outputs[:, 0]
            if not self.partial:
                return [float(score) for score in logits]
        return [float(score) for score in 0.5 * (1 + np.tanh(logits / 2))]


def _pieces(text: str, end: str) -> list[str]:
    """Split into steps, each with its end marker; blank ones join the step before."""
    pieces: list[str] = []
    parts = text.split(end)
    for number, part in enumerate(parts):
        piece = part + end if number < len(parts) - 1 else part
        if pieces and not part.strip():
            pieces[-1] += piece
        else:
            pieces.append(piece)
    return pieces
