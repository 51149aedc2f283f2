"""Diffusion decoders as their authors publish them: plain loops over the logits of the whole text.

Nothing is cached, nothing is batched, nothing is shared with the code under test. `logits_of(x)`
gives what the model says of each position of x, [positions, vocabulary], the mask token excluded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LogitsOf = Callable[[list[int]], Any]


def transfers(count: int, steps: int) -> list[int]:
    """How many tokens each step of a linear noise schedule turns over."""
    return [count // steps + (n < count % steps) for n in range(steps)]


def guesses(logits: Any) -> tuple[Any, Any]:
    """The likeliest token of every position, and its probability."""
    chances = logits.softmax(-1)
    best = logits.argmax(-1)
    return best, chances.gather(-1, best[:, None])[:, 0]


def llada(
    logits_of: LogitsOf,
    prompt: list[int],
    *,
    mask: int,
    length: int,
    block: int,
    steps: int,
    by: str = "probability",
    guidance: float = 0.0,
) -> list[int]:
    """LLaDA's generate, greedy: block after block, the most confident per step (low-confidence
    remasking). `steps` is for each block. Dream ranks by margin or entropy instead."""
    x = [*prompt, *[mask] * length]
    for start in range(len(prompt), len(x), block):
        end = min(start + block, len(x))
        for count in transfers(end - start, steps):
            logits = logits_of(x)
            if guidance:
                without = logits_of([mask] * len(prompt) + x[len(prompt) :])
                logits = without + (guidance + 1) * (logits - without)
                logits[:, mask] = -torch.inf
            best, chance = guesses(logits)
            chances = logits.softmax(-1)
            if by == "margin":
                two = chances.topk(2).values
                chance = two[:, 0] - two[:, 1]
            elif by == "entropy":
                chance = (chances * chances.clamp_min(1e-300).log()).sum(-1)
            unknown = [n for n in range(start, end) if x[n] == mask]
            for n in sorted(unknown, key=lambda n: -float(chance[n]))[:count]:
                x[n] = int(best[n])
    return x[len(prompt) :]


def fast_dllm(
    logits_of: LogitsOf,
    prompt: list[int],
    *,
    mask: int,
    length: int,
    block: int,
    threshold: float | None = None,
    factor: float | None = None,
) -> list[int]:
    """Fast-dLLM's parallel decoding without its cache: of the surest, all above a threshold; or, in
    the order of their confidence c, the first n with (n + 1)(1 - c) <= factor. One at least."""
    x = [*prompt, *[mask] * length]
    for start in range(len(prompt), len(x), block):
        end = min(start + block, len(x))
        while mask in x[start:end]:
            best, chance = guesses(logits_of(x))
            unknown = [n for n in range(start, end) if x[n] == mask]
            order = sorted(unknown, key=lambda n: -float(chance[n]))
            remaining = 1
            for number, n in enumerate(order[1:], start=2):
                c = float(chance[n])
                sure = c >= threshold if threshold is not None else (number + 1) * (1 - c) <= factor
                if not sure:
                    break
                remaining += 1
            for n in order[:remaining]:
                x[n] = int(best[n])
    return x[len(prompt) :]


def entropy_bounded(
    logits_of: LogitsOf, prompt: list[int], *, mask: int, length: int, bound: float
) -> list[int]:
    """The EB-Sampler: of the positions by rising entropy, as many as have no more than the bound
    besides the largest of theirs."""
    x = [*prompt, *[mask] * length]
    while mask in x:
        logits = logits_of(x)
        best, _ = guesses(logits)
        chances = logits.softmax(-1)
        entropy = -(chances * chances.clamp_min(1e-300).log()).sum(-1)
        order = sorted((n for n in range(len(x)) if x[n] == mask), key=lambda n: float(entropy[n]))
        remaining, total = 0, 0.0
        for n in order:
            total += float(entropy[n])
            if total - float(entropy[n]) > bound:
                break
            remaining += 1
        for n in order[: max(1, remaining)]:
            x[n] = int(best[n])
    return x[len(prompt) :]


def sdar(
    logits_of: LogitsOf,
    prompt: list[int],
    *,
    mask: int,
    length: int,
    block: int,
    steps: int,
    strategy: str,
    threshold: float = 0.85,
) -> list[int]:
    """SDAR's block_diffusion_generate, greedy: blocks lie on a grid from the text's beginning, the
    first of them holds the prompt's end. A block sees itself and what is before it."""
    blocks = -(-(len(prompt) + length) // block)
    x = [*prompt, *[mask] * (blocks * block - len(prompt))]
    for start in range(len(prompt) // block * block, len(x), block):
        for count in transfers(block, steps):
            unknown = [n for n in range(start, start + block) if x[n] == mask]
            if not unknown:
                break
            best, chance = guesses(logits_of(x[: start + block]))
            order = sorted(unknown, key=lambda n: -float(chance[n]))
            if strategy == "sequential":
                remaining = unknown[:count]
            elif strategy == "low_confidence_static":
                remaining = order[:count]
            else:
                sure = [n for n in order if float(chance[n]) > threshold]
                remaining = sure if len(sure) >= count else order[:count]
            for n in remaining:
                x[n] = int(best[n])
    return x[len(prompt) : len(prompt) + length]


def llada21(
    logits_of: LogitsOf,
    prompt: list[int],
    *,
    mask: int,
    length: int,
    block: int,
    threshold: float,
    editing: float,
    post_steps: int,
) -> list[int]:
    """LLaDA2.1: besides filling masks above a threshold, a token that is set is replaced by another
    that is likelier than the editing threshold, until nothing changes."""
    blocks = -(-(len(prompt) + length) // block)
    x = [*prompt, *[mask] * (blocks * block - len(prompt))]
    for start in range(len(prompt) // block * block, len(x), block):
        mine, spent = range(max(start, len(prompt)), start + block), 0
        while True:
            unknown = [n for n in mine if x[n] == mask]
            spent += not unknown
            if spent > post_steps:
                break
            best, chance = guesses(logits_of(x[: start + block]))
            order = sorted(unknown, key=lambda n: -float(chance[n]))
            sure = [n for n in order if float(chance[n]) > threshold]
            remaining = sure or order[:1]
            edits = [
                n for n in mine
                if x[n] != mask and int(best[n]) != x[n] and float(chance[n]) > editing
            ]  # fmt: skip
            for n in (*remaining, *edits):
                x[n] = int(best[n])
            if not unknown and not edits:
                break
    return x[len(prompt) : len(prompt) + length]


def shifted(logits_of: LogitsOf) -> LogitsOf:
    """A model whose hidden states predict the next token: Dream's shift of the logits."""

    def moved(x: list[int]) -> Any:
        logits = logits_of(x)
        return torch.cat((logits[:1], logits[:-1]))

    return moved


def twin_blocks(
    clean: LogitsOf,
    noisy: Callable[[list[int], int], Any],
    prompt: list[int],
    *,
    mask: int,
    length: int,
    block: int,
    threshold: float,
) -> list[int]:
    """Block diffusion behind causal text, shifted: a block's first token is the causal model's own,
    the others are filled above a threshold (Fast-dLLM v2, and our own twins)."""
    x = list(prompt)
    while len(x) < len(prompt) + length:
        start = len(x)
        size = min(block, len(prompt) + length - start)
        x += [int(clean(x)[-1].argmax()), *[mask] * (size - 1)]
        while mask in x[start:]:
            best, chance = guesses(noisy(x, start))
            unknown = [n for n in range(start, len(x)) if x[n] == mask]
            order = sorted(unknown, key=lambda n: -float(chance[n - 1]))
            sure = [n for n in order if float(chance[n - 1]) >= threshold]
            for n in sure or order[:1]:
                x[n] = int(best[n - 1])
    return x[len(prompt) :]
