"""Group relative policy optimization (GRPO, arXiv 2402.03300) with rollouts of the engine.

For each prompt a group of answers is sampled and scored by a reward function. An answer's advantage
is its reward, normalized within the group. The loss of a token is

    -min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage) + kl_weight * kl

`ratio` is the token's probability now over that when it was sampled; `kl` is the estimate
p_ref/p - log(p_ref/p) - 1 of the divergence from the reference model. The loss is the mean over an
answer's tokens, then over answers.

The trained adapter is reloaded into the engine before each rollout, so answers are generated at the
engine's speed, from quantized weights, as in serving. If all weights are trained, the engine runs
on those weights; its adapter is then empty and only invalidates the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unspool.lm import LanguageModel
from unspool.model.layers.transformer import Transformer
from unspool.train.data.prepared import EncodedDocument
from unspool.train.data.selection import permuted
from unspool.train.learning.lora import adapter_of
from unspool.train.learning.objectives import Loss
from unspool.train.tuning.dpo import log_probabilities, padded, reference_model
from unspool.train.tuning.tasks import RewardFunction

_ADAPTER_NAME = "being-trained"
_MIN_DEVIATION = 1e-4


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt: its tokens, its text, and its data row for the reward function."""

    ids: tuple[int, ...]
    text: str
    row: dict[str, Any]


@dataclass
class AnswerBatch:
    """The answers of several groups, one row each."""

    ids: Tensor  # [B, T + 1]
    loss_mask: Tensor  # [B, T]
    advantages: Tensor  # [B]
    before: Tensor | None = None  # [B, T]: log-probabilities when sampled; None: those of now
    reward: float = 0.0  # mean over all answers


def advantages(rewards: Tensor) -> Tensor:
    """Rewards [groups, answers], normalized within each group."""
    mean = rewards.mean(1, keepdim=True)
    deviation = rewards.std(1, keepdim=True) if rewards.shape[1] > 1 else torch.zeros_like(mean)
    return (rewards - mean) / (deviation + _MIN_DEVIATION)


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
    """Loss of each token; all tensors but `advantage` [B] are log-probabilities [B, T]."""
    ratio = torch.exp(now - before)
    gain = advantage[:, None]
    losses = -torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)
    if reference is not None:
        log_ratio = reference - now
        losses = losses + kl_weight * (torch.exp(log_ratio) - log_ratio - 1)
    return losses


@dataclass(frozen=True)
class Grpo:
    """The GRPO objective."""

    low: float = 0.2
    high: float = 0.2
    kl_weight: float = 0.0
    reference: Transformer | None = None  # for `kl`; None: the model with LoRA disabled

    def __call__(self, model: Transformer, batch: AnswerBatch, rng: torch.Generator) -> Loss:
        now = log_probabilities(model, batch.ids, batch.loss_mask)
        reference = None
        if self.kl_weight:
            with torch.no_grad(), reference_model(model, self.reference) as earlier:
                reference = log_probabilities(earlier, batch.ids, batch.loss_mask)
        before = now.detach() if batch.before is None else batch.before
        losses = grpo_losses(
            now, before, batch.advantages, low=self.low, high=self.high,
            reference=reference, kl_weight=self.kl_weight,
        )  # fmt: skip
        mask = batch.loss_mask
        means = (losses * mask).sum(1) / mask.sum(1).clamp(min=1)
        length = float(mask.sum(1).float().mean())
        return Loss(means.mean(), len(means), {"reward": batch.reward, "answer_tokens": length})


class AnswerBatches:
    """Rollouts of the current model; batch n is a function of n and the weights."""

    def __init__(
        self,
        model: Transformer,
        lm: LanguageModel,
        questions: Sequence[Question],
        reward: RewardFunction,
        *,
        groups: int = 4,
        answers: int = 8,
        max_tokens: int = 64,
        temperature: float = 1.0,
        updates: int = 1,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        on_answers: Callable[[list[tuple[str, float]]], None] = lambda answers: None,
    ) -> None:
        self._model, self._lm, self._questions, self._reward = model, lm, questions, reward
        self._groups, self._answers, self._seed = groups, answers, seed
        self._on_answers = on_answers
        self._rank, self._world = rank, world
        self._updates = updates  # steps that learn from the same answers
        self._options: dict[str, Any] = {
            "max_tokens": max_tokens, "temperature": temperature,
            "top_k": 0, "top_p": 1.0, "min_p": 0.0, "adapter": _ADAPTER_NAME,
        }  # fmt: skip
        self._rollout: tuple[int, AnswerBatch] | None = None
        self.batch_size, self.length = groups * answers, max_tokens

    on_policy = True  # a batch depends on the weights after the steps before it

    def batch(self, step: int) -> AnswerBatch:
        number = step // self._updates
        if self._rollout is None or self._rollout[0] != number:
            self._rollout = number, self._generate(number)
        return self._rollout[1]

    def _generate(self, number: int) -> AnswerBatch:
        from unspool.decoding.batch import run_all

        lm = self._lm
        lm.engine.adapters.load(_ADAPTER_NAME, adapter_of(self._model))
        questions = self._draw_questions(number)
        options = {**self._options, "stop": lm.chat_template.stops}
        repeated = [question for question in questions for _ in range(self._answers)]
        generations = [
            lm.prepare_generation(
                question.ids, seed=self._seed + number, sample=n % self._answers, **options
            )
            for n, question in enumerate(repeated)
        ]
        run_all(lm, generations, patient=False)
        texts = [generation.text for generation in generations]
        rewards = [
            float(self._reward(question.text, text, question.row))
            for question, text in zip(repeated, texts, strict=True)
        ]
        self._on_answers(list(zip(texts, rewards, strict=True)))
        by_group = torch.tensor(rewards).view(len(questions), self._answers)
        rows = [
            _encode_answer(question.ids, generation.tokens)
            for question, generation in zip(repeated, generations, strict=True)
        ]
        ids, loss_mask = padded(rows)
        batch = AnswerBatch(
            ids, loss_mask, advantages(by_group).flatten(), reward=float(by_group.mean())
        )
        if self._updates > 1:
            device = self._model.embed.weight.device
            with torch.no_grad():
                on_device = ids.to(device), loss_mask.to(device)
                batch.before = log_probabilities(self._model, *on_device).cpu()
        return batch

    def _draw_questions(self, number: int) -> list[Question]:
        count, first = len(self._questions), (number * self._world + self._rank) * self._groups
        epochs, positions = np.divmod(np.arange(first, first + self._groups), count)
        return [
            self._questions[int(permuted(np.array([position]), count, f"{self._seed} {epoch}")[0])]
            for epoch, position in zip(epochs, positions, strict=True)
        ]


def _encode_answer(prompt: Sequence[int], answer: Sequence[int]) -> EncodedDocument:
    """A prompt and its answer, with the loss on the answer."""
    ids = np.array([*prompt, *answer], np.uint32)
    return EncodedDocument(ids, np.arange(len(ids)) >= len(prompt), 0)
