"""A reward model as a judge: a sequence-classification checkpoint whose head scores a text.

    RewardJudge(lm, unspool.load("reward-model"))                  # the whole text, one number
    RewardJudge(lm, unspool.load("prm"), process=True)             # every step, the worst counts

Its layers run on our engine like any model's, so texts that begin alike are read once; the head is
applied to the vector behind the last token, as in transformers. A process-reward model scores the
end of each step; what was scored once is remembered, because nothing that follows changes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from unspool.backends.step import Floats
from unspool.decoding.think.judge import Verdict
from unspool.decoding.think.judges.reading import Messages, Reader
from unspool.decoding.written import Branches
from unspool.engine.generation import Generation
from unspool.errors import SettingsError
from unspool.model.score_head import ScoreHead, read_score_head
from unspool.session import Session

_STEP_TOKEN = "<extra_0>"  # where Qwen's process-reward models look
_GATHER: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "last": lambda scores: scores[-1],
    "mean": lambda scores: math.fsum(scores) / len(scores),
    "product": math.prod,
}
Row = tuple[list[int], list[int]]  # tokens, and the positions that are scored


class RewardJudge:
    """What a reward model says of a text.

    process    score the end of each step, not of the whole alone; by default as the model was made.
    gather     one score from those of the steps: min, last, mean or product.
    step       what ends a step.
    asked      the conversation that the texts answer, if the prompt is not one message.
    """

    def __init__(
        self,
        lm: Session,
        model: Session,
        *,
        process: bool | None = None,
        gather: Literal["min", "last", "mean", "product"] = "min",
        step: str = "\n\n",
        asked: Messages | None = None,
    ) -> None:
        if model.path is None:
            raise SettingsError("the reward model came from no folder, so its head is not known")
        if gather not in _GATHER:
            raise SettingsError(f"gather is {gather!r}; it may be {', '.join(_GATHER)}")
        if not step:
            raise SettingsError("step is empty; it may be what ends a step, such as two newlines")
        self._head: ScoreHead = read_score_head(model.path)
        if self._head.labels > 2:
            raise SettingsError(
                f"{model.path.name} has {self._head.labels} labels; a reward model has one number, "
                "or two labels of which the second means good"
            )
        self.partial = self._head.per_token if process is None else process
        self._reader = Reader(model, lm, asked)
        self._gather, self._step = _GATHER[gather], step
        self._known: dict[tuple[int, ...], float] = {}

    def cost(self, texts: Sequence[Generation]) -> int:
        """What its model reads."""
        return self._reader.cost([row for row, _ in map(self._row, texts) if self._is_new(row)])

    def judge(self, texts: Sequence[Generation]) -> list[Verdict]:
        rows = [self._row(text) for text in texts]
        self._read([row for row in rows if self._is_new(row[0]) and self._reader.fits(row[0])])
        return [self._verdict(*row) for row in rows]

    def _verdict(self, row: list[int], places: list[int]) -> Verdict:
        if not self._reader.fits(row):
            return Verdict(
                None,
                f"{len(row)} tokens are more than the reward model's {self._reader.lm.context}",
            )
        scores = [self._known[tuple(row[: place + 1])] for place in places]
        if not all(map(math.isfinite, scores)):
            return Verdict(None, "the reward model gave no finite number")
        told = " ".join(f"{score:.3f}" for score in scores)
        return Verdict(self._gather(scores), f"steps: {told}" if self.partial else "")

    def _is_new(self, row: list[int]) -> bool:
        return tuple(row) not in self._known

    # -- what it reads -------------------------------------------------------------------------

    def _row(self, text: Generation) -> Row:
        reader = self._reader
        if self.partial and text.text and reader.lm._tokenizer is not None:
            return self._in_steps(text)
        if reader.lm.is_instruct:
            template = reader.lm.chat_template
            row = template.encode(reader.messages(text), add_generation_prompt=False).ids
        else:
            row = reader.plain(text)
        return row, [len(row) - 1]

    def _in_steps(self, text: Generation) -> Row:
        """The text step by step, each encoded by itself, so that one is never another's end."""
        reader, lm = self._reader, self._reader.lm
        if lm.is_instruct:
            row = list(lm.chat_template.encode(reader.messages(text)[:-1]).ids)
        else:
            row = lm.tokenizer.encode_prompt(reader.prompt_of(text))
        mark = lm.tokenizer.special_tokens.get(_STEP_TOKEN)
        places: list[int] = []
        for piece in _pieces(text.text, self._step):
            row += (
                lm.tokenizer.encode(piece)
                if mark is None
                else lm.tokenizer.encode(piece.removesuffix(self._step))
            )
            row += [] if mark is None else [mark]
            places.append(len(row) - 1)
        return row, places

    def _read(self, rows: Sequence[Row]) -> None:
        lm, reader = self._reader.lm, self._reader
        lm.config.check_left_to_right()
        for batch in reader.batches(len(rows)):
            group = [rows[number] for number in batch]
            with Branches(lm.engine, lm.adapter) as held:
                opened = [held.open(row) for row, _ in group]
                at = [frozenset(self._unknown(*row)) for row in group]
                seen = lm.engine.look_all([(branch, ()) for branch in opened], at=at)
            for row, places, found in zip((row for row, _ in group), at, seen, strict=True):
                vectors = [inside.residuals[-1] for inside in found.inside
                           if inside.residuals is not None]  # fmt: skip
                scores = self._scores(lm.model.normed(np.concatenate(vectors)))
                for place, score in zip(sorted(places), scores, strict=True):
                    self._known[tuple(row[: place + 1])] = score
                reader.knows(row)

    def _unknown(self, row: list[int], places: list[int]) -> list[int]:
        return [place for place in places if tuple(row[: place + 1]) not in self._known]

    def _scores(self, vectors: Floats) -> list[float]:
        """One number a token: of two labels the second's probability, of a step's one its sigmoid,
        of a whole text's the number itself."""
        found = self._head(vectors).astype(np.float64)
        if self._head.labels == 2:
            logits = found[:, 1] - found[:, 0]
        else:
            logits = found[:, 0]
            if not self.partial:
                return [float(score) for score in logits]
        return [float(score) for score in 0.5 * (1 + np.tanh(logits / 2))]


def _pieces(text: str, end: str) -> list[str]:
    """Steps, each with what ends it; blank ones belong to the step before."""
    pieces: list[str] = []
    parts = text.split(end)
    for number, part in enumerate(parts):
        whole = part + end if number < len(parts) - 1 else part
        if pieces and not part.strip():
            pieces[-1] += whole
        else:
            pieces.append(whole)
    return pieces
