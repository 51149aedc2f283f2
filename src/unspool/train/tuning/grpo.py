"""GRPO: answers written by the engine, judged by any function, and learned from (arXiv 2402.03300).

For each question a group of answers is sampled. An answer's advantage is by how much better it was
judged than its group, in deviations of the group, and each of its tokens is made likelier or less
likely by it:

    -min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage) + kl_weight * kl

`ratio` is the token's probability now over that when it was sampled; `kl` is the estimate
p_ref/p - log(p_ref/p) - 1 of how far the model has gone from where it began. The loss is the mean
over an answer's tokens, then over answers.

The adapter being trained is loaded into an engine anew before each group is written, so answers
come at the engine's speed, from packed weights, as they will when the adapter is served. Where all
weights are trained, the engine runs on those very weights; its adapter is empty then, and only sees
to it that nothing computed before is found again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unspool.language_model import LanguageModel
from unspool.model.transformer import Transformer
from unspool.train.data.encoding import Encoded
from unspool.train.data.shuffle import permuted
from unspool.train.learning.lora import adapter_of
from unspool.train.learning.objectives import Loss
from unspool.train.tuning.preference import Judge, as_before, log_probabilities, padded

_NAME = "being-trained"
_LEAST_DEVIATION = 1e-4


@dataclass(frozen=True, slots=True)
class Question:
    """Something to be answered: its tokens, its text, and what the judge wants to know besides."""

    ids: tuple[int, ...]
    text: str
    row: dict[str, Any]


@dataclass
class AnswerBatch:
    """Answers of several groups, one row each."""

    ids: Tensor  # [B, T + 1]
    counted: Tensor  # [B, T]
    advantages: Tensor  # [B]
    before: Tensor | None = None  # [B, T]: log-probabilities when they were sampled; None: just now
    reward: float = 0.0  # of all answers, on average


def advantages(rewards: Tensor) -> Tensor:
    """[groups, answers]: how much better than the group, in deviations of the group."""
    mean = rewards.mean(1, keepdim=True)
    deviation = rewards.std(1, keepdim=True) if rewards.shape[1] > 1 else torch.zeros_like(mean)
    return (rewards - mean) / (deviation + _LEAST_DEVIATION)


def grpo_losses(
    now: Tensor,
    before: Tensor,
    advantage: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    reference: Tensor | None = None,
    kl_weight: float = 0.0,
) -> Tensor:
    """The loss of each token; all but `advantage` [B] are log-probabilities [B, T]."""
    ratio = torch.exp(now - before)
    gain = advantage[:, None]
    losses = -torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)
    if reference is not None:
        gone = reference - now
        losses = losses + kl_weight * (torch.exp(gone) - gone - 1)
    return losses


@dataclass(frozen=True)
class Grpo:
    """GRPO as an objective of the trainer."""

    low: float = 0.2
    high: float = 0.2
    kl_weight: float = 0.0
    earlier: Transformer | None = None  # the model as it was, for `kl`; None: LoRA is switched off

    def __call__(self, model: Transformer, batch: AnswerBatch, rng: torch.Generator) -> Loss:
        now = log_probabilities(model, batch.ids, batch.counted)
        reference = None
        if self.kl_weight:
            with torch.no_grad(), as_before(model, self.earlier) as earlier:
                reference = log_probabilities(earlier, batch.ids, batch.counted)
        before = now.detach() if batch.before is None else batch.before
        losses = grpo_losses(
            now, before, batch.advantages, low=self.low, high=self.high,
            reference=reference, kl_weight=self.kl_weight,
        )  # fmt: skip
        counted = batch.counted
        means = (losses * counted).sum(1) / counted.sum(1).clamp(min=1)
        length = float(counted.sum(1).float().mean())
        return Loss(means.mean(), len(means), {"reward": batch.reward, "answer_tokens": length})


class AnswerBatches:
    """Questions answered by the model as it is now; batch n is a function of n and the weights."""

    def __init__(
        self,
        model: Transformer,
        lm: LanguageModel,
        questions: Sequence[Question],
        judge: Judge,
        *,
        groups: int = 4,
        answers: int = 8,
        max_tokens: int = 64,
        temperature: float = 1.0,
        updates: int = 1,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        told: Callable[[list[tuple[str, float]]], None] = lambda answers: None,
    ) -> None:
        self._model, self._lm, self._questions, self._judge = model, lm, questions, judge
        self._groups, self._answers, self._seed, self._told = groups, answers, seed, told
        self._rank, self._world = rank, world
        self._updates = updates  # steps that learn from the same answers
        self._options: dict[str, Any] = {
            "max_tokens": max_tokens, "temperature": temperature,
            "top_k": 0, "top_p": 1.0, "min_p": 0.0, "adapter": _NAME,
        }  # fmt: skip
        self._kept: tuple[int, AnswerBatch] | None = None
        self.batch_size, self.length = groups * answers, max_tokens

    on_policy = True  # a batch is what the model writes after the steps before it

    def batch(self, step: int) -> AnswerBatch:
        turn = step // self._updates
        if self._kept is None or self._kept[0] != turn:
            self._kept = turn, self._written(turn)
        return self._kept[1]

    def _written(self, turn: int) -> AnswerBatch:
        lm = self._lm
        lm.engine.adapters.load(_NAME, adapter_of(self._model))
        asked = self._asked(turn)
        options = {**self._options, "stop": lm.chat_template.stops}
        drafts = [
            lm.draft(question.ids, seed=self._seed + turn, sample=number, **options)
            for question in asked
            for number in range(self._answers)
        ]
        written = self._write(drafts)
        texts = [generation.text for generation in written]
        several = [question for question in asked for _ in range(self._answers)]
        rewards = [
            float(self._judge(question.text, text, question.row))
            for question, text in zip(several, texts, strict=True)
        ]
        self._told(list(zip(texts, rewards, strict=True)))
        judged = torch.tensor(rewards).view(len(asked), self._answers)
        rows = [
            _encoded(question.ids, generation.tokens)
            for question, generation in zip(several, written, strict=True)
        ]
        ids, counted = padded(rows)
        batch = AnswerBatch(ids, counted, advantages(judged).flatten(), reward=float(judged.mean()))
        if self._updates > 1:
            device = self._model.embed.weight.device
            with torch.no_grad():
                on_device = ids.to(device), counted.to(device)
                batch.before = log_probabilities(self._model, *on_device).cpu()
        return batch

    def _write(self, drafts: list[Any]) -> list[Any]:
        from unspool.decoding.together import write_all

        write_all(self._lm, drafts, patient=False)
        return drafts

    def _asked(self, turn: int) -> list[Question]:
        count, first = len(self._questions), (turn * self._world + self._rank) * self._groups
        epochs, places = np.divmod(np.arange(first, first + self._groups), count)
        return [
            self._questions[int(permuted(np.array([place]), count, f"{self._seed} {epoch}")[0])]
            for epoch, place in zip(epochs, places, strict=True)
        ]


def _encoded(prompt: Sequence[int], answer: Sequence[int]) -> Encoded:
    """A prompt and its answer, of which the answer counts."""
    ids = np.array([*prompt, *answer], np.uint32)
    return Encoded(ids, np.arange(len(ids)) >= len(prompt), 0)
