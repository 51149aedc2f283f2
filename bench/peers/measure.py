"""What is measured: jobs for the workers, the memory's bandwidth, medians of paired ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from peers.workers import Worker

DECODE_PROMPT, DECODE_NEW = 32, 128
PROMPT = 512
BATCH, BATCH_PROMPT, BATCH_NEW = 16, 64, 128
CONTEXTS = (128, 512, 1024, 2048, 4096, 8000)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
GROWTH_NEW = 32
KV_BYTES = 23_040  # of a token in SmolLM2-135M: 2 x 30 layers x 3 heads x 64 numbers of 16 bits


class Prompts:
    """Texts that begin differently each time, so that no engine can reuse what it computed."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids, self.given = list(ids), 0

    def take(self, length: int) -> list[int]:
        self.given += 1
        start = self.given * 37 % len(self.ids)
        text = self.ids[start:] + self.ids * (length // len(self.ids) + 1)
        return [1000 + self.given * 7 % 40_000, *text[: length - 1]]


@dataclass(frozen=True)
class Speed:
    """One run of one engine."""

    tokens_s: float
    ids: list[list[int]]


def decode(worker: Worker, prompt: list[int], new: int = DECODE_NEW) -> Speed:
    """Tokens a second after the first: reading the prompt is not counted."""
    found = worker.ask(work="write", prompts=[prompt], new=new)
    return Speed((new - 1) / (found["seconds"] - found["first_s"]), found["ids"])


def prompt(worker: Worker, ids: list[int]) -> Speed:
    """Prompt tokens a second, up to the first token written."""
    found = worker.ask(work="write", prompts=[ids], new=1)
    return Speed(len(ids) / found["seconds"], found["ids"])


def batch(worker: Worker, prompts: list[list[int]], new: int = BATCH_NEW) -> Speed:
    """Tokens a second of all texts together; reading the prompts is in the time, and only new
    tokens are counted."""
    found = worker.ask(work="write", prompts=prompts, new=new)
    return Speed(len(prompts) * new / found["seconds"], found["ids"])


def bandwidth(threads: int, megabytes: int, repeat: int = 9) -> float:
    """Bytes a second that so many threads read from a block of memory of this size.

    The block is written first: memory that never was reads as one shared page of zeros.
    """
    from unspool.backends.cpu.structures import address_of, native_functions

    block = np.ones(megabytes * 1_000_000, np.uint8)
    best = 0.0
    for _ in range(repeat):
        began = time.perf_counter()
        native_functions().unspool_read_memory(address_of(block), block.nbytes, threads, 1)
        best = max(best, block.nbytes / (time.perf_counter() - began))
    return best


def bytes_a_token(weight_bytes: int) -> int:
    """What the decode job reads for one token: the weights, and half-grown keys and values."""
    return weight_bytes + KV_BYTES * (DECODE_PROMPT + DECODE_NEW // 2)


def agreement(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts have in common before they part."""
    pairs = zip(a, b, strict=False)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def paired(ours: Sequence[float | None], theirs: Sequence[float | None]) -> dict[str, float] | None:
    """Median, least and largest of the ratios within each round."""
    both = [a / b for a, b in zip(ours, theirs, strict=False) if a and b]
    if not both:
        return None
    return {"median": statistics.median(both), "low": min(both), "high": max(both)}


def middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


Grown = dict[str, dict[str, dict[int, list[float]]]]  # engine, kind, point: tokens a second


def growth(
    workers: dict[str, Worker],
    prompts: Prompts,
    rounds: int,
    found: Grown,
    tell: Callable[[str], None],
) -> None:
    """Tokens a second against context length and batch size, the engines taking turns.

    Goes into `found` as it comes: the long texts take minutes, and one may want to stop there.
    """
    for rows in BATCHES:
        tell(f"batch {rows}")
        for _ in range(rounds):
            texts = [prompts.take(BATCH_PROMPT) for _ in range(rows)]
            for key, worker in workers.items():
                speed = batch(worker, texts, GROWTH_NEW).tokens_s
                note(found, key, "batch", rows, speed)
    for length in CONTEXTS:
        tell(f"context {length}")
        for _ in range(rounds if length < 4096 else 1):  # reading it takes longest, untimed
            text = prompts.take(length)
            for key, worker in workers.items():
                note(found, key, "context", length, decode(worker, text, GROWTH_NEW).tokens_s)


def note(found: Grown, key: str, kind: str, point: int, speed: float) -> None:
    found.setdefault(key, {}).setdefault(kind, {}).setdefault(point, []).append(speed)
