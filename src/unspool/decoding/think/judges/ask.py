"""Ask a causal model whether a text is correct: P(yes) / (P(yes) + P(no)).

    AskVerifier(lm)                                           # the model that wrote it
    AskVerifier(lm, unspool.load("qwen3-4b"), question="Is this polite? Answer yes or no.")

When the model scores its own text, the question is appended as the next turn, so only the question
is computed: the rest is in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unspool.backends.step import Logits
from unspool.decoding.think.judge import Verdict
from unspool.decoding.think.judges.reading import Messages, Reader
from unspool.decoding.written import HeldBranches
from unspool.engine.generation import Generation
from unspool.errors import SettingsError
from unspool.sampling.operations import array_operations
from unspool.sampling.scoring import log_softmax
from unspool.session import Session

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
        self._yes, self._no = (first_tokens(self._reader.lm, words) for words in (_YES, _NO))
        if self._yes & self._no:
            raise SettingsError(
                "in this model's vocabulary yes and no start with the same token, so it cannot be "
                "asked; use another verifier"
            )
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
                verdicts[number] = Verdict(self._probability_yes(row))
                reader.mark_cached(rows[number])
        return verdicts

    def _probability_yes(self, logits: Logits) -> float:
        logprobs = array_operations(logits).to_numpy(log_softmax(logits))[-1].astype(np.float64)
        yes, no = (float(np.exp(logprobs[sorted(ids)]).sum()) for ids in (self._yes, self._no))
        return yes / (yes + no) if yes + no > 0 else 0.5

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


def first_tokens(lm: Session, words: Sequence[str]) -> frozenset[int]:
    """First tokens of these words; words that are a single token are preferred."""
    encoded = [lm.tokenizer.encode(word) for word in words]
    single_tokens = frozenset(ids[0] for ids in encoded if len(ids) == 1)
    return single_tokens or frozenset(ids[0] for ids in encoded[:2] if ids)
