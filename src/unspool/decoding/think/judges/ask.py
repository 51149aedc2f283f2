"""A causal model that is asked whether a text is right: P(yes) / (P(yes) + P(no)).

    AskJudge(lm)                                           # the writer itself
    AskJudge(lm, unspool.load("qwen3-4b"), question="Is this polite? Answer yes or no.")

Where the writer judges its own text, the question is put behind the text as the next turn, so that
only the question is computed: all the rest is in the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unspool.backends.step import Logits
from unspool.decoding.think.judge import Verdict
from unspool.decoding.think.judges.reading import Messages, Reader
from unspool.decoding.written import Branches
from unspool.engine.generation import Generation
from unspool.errors import SettingsError
from unspool.sampling.operations import operations
from unspool.sampling.scoring import log_softmax
from unspool.session import Session

QUESTION = "Is the answer above correct and complete? Reply with yes or no."
_PLAIN = "\n\nQuestion: {question}\nAnswer:"
_YES, _NO = ("Yes", "yes", " Yes", " yes"), ("No", "no", " No", " no")


class AskJudge:
    """How sure a model is that a text is right.

    model      who is asked; by default the one that wrote the text.
    question   what it is asked, to be answered with yes or no.
    asked      the conversation that the texts answer, if the prompt is not one message.
    """

    partial = True

    def __init__(
        self,
        lm: Session,
        model: Session | None = None,
        *,
        question: str = QUESTION,
        asked: Messages | None = None,
    ) -> None:
        (model or lm).config.check_head()
        self._reader, self._question = Reader(model or lm, lm, asked), question
        self._yes, self._no = (first_tokens(self._reader.lm, words) for words in (_YES, _NO))
        if self._yes & self._no:
            raise SettingsError(
                "in this model's vocabulary yes and no begin with the same token, so it cannot be "
                "asked; use another judge"
            )
        self._turn = self._next_turn()

    def cost(self, texts: Sequence[Generation]) -> int:
        """What its model reads."""
        return self._reader.cost(self._rows(texts))

    def judge(self, texts: Sequence[Generation]) -> list[Verdict]:
        reader, rows = self._reader, self._rows(texts)
        fitting = [number for number, row in enumerate(rows) if reader.fits(row)]
        why = f"the text and the question are more than the judge's {reader.lm.context} tokens"
        found = [Verdict(None, why)] * len(rows)
        for batch in reader.batches(len(fitting)):
            numbers = [fitting[place] for place in batch]
            with Branches(reader.lm.engine, reader.lm.adapter) as held:
                opened = [held.open(rows[number]) for number in numbers]
                logits = reader.lm.engine.extend_all([(branch, ()) for branch in opened])
            for number, row in zip(numbers, logits, strict=True):
                found[number] = Verdict(self._sure(row))
                reader.knows(rows[number])
        return found

    def _sure(self, logits: Logits) -> float:
        own = operations(logits).host(log_softmax(logits))[-1].astype(np.float64)
        yes, no = (float(np.exp(own[sorted(ids)]).sum()) for ids in (self._yes, self._no))
        return yes / (yes + no) if yes + no > 0 else 0.5

    # -- what it reads -------------------------------------------------------------------------

    def _rows(self, texts: Sequence[Generation]) -> list[list[int]]:
        for text in texts if self._reader.is_writer else ():
            self._reader.knows([*text.prompt, *text.tokens[:-1]])  # as the search has left it
        return [self._row(text) for text in texts]

    def _row(self, text: Generation) -> list[int]:
        reader, lm = self._reader, self._reader.lm
        if not reader.is_writer:
            return self._told(text)
        if not self._is_chat(text):
            return [*self._kept(text), *lm.tokenizer.encode(_PLAIN.format(question=self._question))]
        if self._turn is None:
            return self._told(text)
        return [*self._kept(text), *self._turn]

    def _told(self, text: Generation) -> list[int]:
        """The whole conversation in the model's own words."""
        reader, lm = self._reader, self._reader.lm
        if lm.is_instruct:
            turn = {"role": "user", "content": self._question}
            return lm.chat_template.encode([*reader.messages(text), turn]).ids
        said = reader.prompt_of(text) + text.text + _PLAIN.format(question=self._question)
        return lm.tokenizer.encode_prompt(said)

    def _kept(self, text: Generation) -> list[int]:
        """Prompt and text, without an end token: what comes next writes its own."""
        tokens = text.tokens
        if tokens and tokens[-1] in self._reader.lm.end_ids:
            tokens = tokens[:-1]
        return [*text.prompt, *tokens]

    def _is_chat(self, text: Generation) -> bool:
        """Whether the prompt came from the chat template, which alone writes control tokens."""
        lm = self._reader.lm
        marks = lm.tokenizer.special_ids - {lm.tokenizer.bos_id}
        return lm.is_instruct and not marks.isdisjoint(text.prompt)

    def _next_turn(self) -> list[int] | None:
        """What the template writes from the end of an answer to the start of the next; None where
        it rewrites what was said before."""
        lm = self._reader.lm
        if not (self._reader.is_writer and lm.is_instruct):
            return None
        said = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "."},
            {"role": "user", "content": self._question},
        ]
        return lm.chat_template.encode_after(said, 1)


def first_tokens(lm: Session, words: Sequence[str]) -> frozenset[int]:
    """The tokens that these words begin with: most are one token, with a space or without."""
    encoded = [lm.tokenizer.encode(word) for word in words]
    whole = frozenset(ids[0] for ids in encoded if len(ids) == 1)
    return whole or frozenset(ids[0] for ids in encoded[:2] if ids)
