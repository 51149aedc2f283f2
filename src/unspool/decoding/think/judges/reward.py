"""A reward model as a verifier: a sequence-classification checkpoint whose head scores a text.

    RewardVerifier(lm, unspool.load("reward-model"))                  # the whole text, one number
    RewardVerifier(lm, unspool.load("prm"), process=True)             # the lowest step score

Its layers run on the engine like any model's, so common prefixes are computed once; the head is
applied to the hidden state of the last token, as in transformers. A process reward model scores the
end of each step; scores are cached, since later text does not change them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from unspool.backends.step import Floats
from unspool.decoding.think.judge import Verdict
from unspool.decoding.think.judges.reading import Messages, Reader
from unspool.decoding.written import HeldBranches
from unspool.engine.generation import Generation
from unspool.errors import SettingsError
from unspool.model.score_head import ScoreHead, read_score_head
from unspool.session import Session

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
