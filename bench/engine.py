"""Costs of the engine, and savings of the tree: python bench/engine.py [PART ...]

overhead  µs per step of the engine alone, with a model that computes nothing
host      the same with the GPU backend without its kernels (no GPU needed)
tree      µs of a fork and a rewind by the length of the text (should be constant)
states    recurrent models: what a rewind computes again, and the memory of stored states
guard     how often the default model loops under greedy decoding, and how often it is repaired

Without a name, all of them.
"""

import gc
import os
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import unspool
from lib.arguments import make_parser, one_of
from lib.stats import seconds
from unspool.backends.step import CompletedStep, StepBatch, StepLimits, StepResult, empty_ints
from unspool.engine.engine import Engine
from unspool.engine.request import Limits, Request
from unspool.sampling import SamplingSettings
from unspool.sampling.monitors import repetition_rate
from unspool.sampling.picker import pick_tokens

VOCABULARY = 49_152
TESTS = str(Path(__file__).parents[1] / "tests")
PROMPTS = [
    "def main():\n",
    "I think that",
    "Dear Sir or Madam,",
    "The cat sat on the mat. The",
    "Shopping list:\n-",
    "He said that she said that",
    "The best way to learn is",
    "My name is",
    "In conclusion,",
    "Roses are red,",
]


class NullBackend:
    """Backend with constant logits.

    With `picks` it samples from them like a real backend; otherwise it returns constant tokens, so
    that only Python's share of a step remains.
    """

    page_size, page_bytes, overlaps, echoes = 16, 1, False, False
    limits, state_bytes, state_count = StepLimits(), 0, 0
    page_count, context, vocab_size = 20_000, 120_000, VOCABULARY

    def __init__(self, rows: int, picks: bool = True) -> None:
        random = np.random.default_rng(0)
        self.logits = random.standard_normal((rows, VOCABULARY)).astype(np.float32) * 4
        self.picks, self.tokens, self.logprobs = picks, np.arange(rows), np.zeros(rows)

    def set_adapter(self, number: int, adapter: Any) -> None:
        raise NotImplementedError

    def launch(self, batch: StepBatch) -> CompletedStep:
        count, logits = len(batch.sample_indices), self.logits[: len(batch.logits_indices)]
        if batch.sampling is None:
            return CompletedStep(StepResult(empty_ints(), self.logprobs[:0], logits))
        if not self.picks:
            return CompletedStep(StepResult(self.tokens[:count], self.logprobs[:count], logits))
        picks = pick_tokens(self.logits[:count], batch.sampling, threads=2)
        return CompletedStep(StepResult(picks.tokens, picks.logprobs, logits))


def generate(engine: Engine, rows: int, count: int, limits: Any, options: Any) -> None:
    requests = [
        Request(
            prompt=(1, 2, 3),
            settings=SamplingSettings(seed=n, **options),
            limits=Limits(max_tokens=count, context=100_000, **limits),
        )
        for n in range(rows)
    ]
    for stream in [engine.submit(request) for request in requests]:
        for _ in stream:
            pass


def overhead() -> None:
    print("the engine alone, µs per step (null model, vocabulary 49,152)")
    variants: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
        "Python's share, greedy": ({"temperature": 0}, {}, False),
        "Python's share, default": ({}, {}, False),
        "with sampling, greedy": ({"temperature": 0}, {}, True),
        "with sampling, default": ({}, {}, True),
        "explained, default": ({}, {"explain": True}, True),
        "explained, top 20": ({}, {"explain": True, "top": 20}, True),
    }
    for name, (options, limits, picks) in variants.items():
        cells = []
        for rows in (1, 16, 64, 256):
            engine = Engine(NullBackend(rows, picks), lambda token: b"x")
            count = (400 if picks else 2000) // rows + 8
            work = partial(generate, engine, rows, count, limits, options)
            work()
            step = min(seconds(work) for _ in range(3)) / count * 1e6
            cells.append(f"{rows}: {step:,.0f} ({step / rows:,.0f} per token)")
            engine.close()
        print(f"  {name:<24} {';  '.join(cells)}")


def host() -> None:
    """Host time of a step as on a GPU, and the backend's share of it."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    sys.path.insert(0, TESTS)
    from helpers import cuda_support
    from helpers.paged_texts import RandomCheckpoint, config

    shape = config(vocab_size=VOCABULARY, layers=1, context=20_000)
    loaded: Any = cuda_support.cuda_model(RandomCheckpoint(shape))
    print("host time of a step on a GPU, µs (without kernels)")
    variants = {"greedy": {"temperature": 0}, "default": {}, "penalty": {"frequency_penalty": 0.5}}
    for name, options in variants.items():
        cells = []
        for rows in (1, 16, 256):
            backend = loaded.backend(memory=256 << 20, context=2048)
            backend._graphs.run = lambda key, launch: None
            times = {"steps": 0.0, "launch": 0.0, "result": 0.0}

            def launch(batch: StepBatch, original: Any = backend.launch, times: Any = times) -> Any:
                start = time.perf_counter()
                step = original(batch)
                launched = time.perf_counter()
                result = step.result()
                times["steps"] += 1
                times["launch"] += launched - start
                times["result"] += time.perf_counter() - launched
                return CompletedStep(result)

            backend.launch = launch
            engine, count = Engine(backend, lambda token: b"x"), 1500 if rows == 1 else 128
            work = partial(generate, engine, rows, count, {}, options)
            work()
            best: tuple[float, ...] = (1e9,)
            for _ in range(5):
                times.update(steps=0.0, launch=0.0, result=0.0)
                parts = (seconds(work), times["launch"], times["result"])
                best = min(best, tuple(part / times["steps"] * 1e6 for part in parts))
            cells.append(f"{rows}: {best[0]:,.0f} (launch {best[1]:.0f}, result {best[2]:.0f})")
            engine.close()
        print(f"  {name:<10} {';  '.join(cells)}")
    print(f"  a prompt of 16,000 tokens and its first token: {prompt_host_time(loaded):,.0f}")


def prompt_host_time(loaded: Any) -> float:
    """Median host time of a prompt in one step, µs, while the collector skips what existed before,
    as in `unspool serve`."""
    backend = loaded.backend(memory=256 << 20, context=20_000)
    backend.limits = replace(backend.limits, prefill_alone=16_384)
    backend._prefill.run = lambda prefill, hooks: backend.runner.logits
    backend._sample_prefill = lambda logits, pick: None
    engine, random = Engine(backend, lambda token: b"x"), np.random.default_rng(0)
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(11):
        prompt = tuple(random.integers(0, VOCABULARY, 16_000).tolist())
        limits = Limits(max_tokens=1, context=20_000)
        request = Request(prompt=prompt, settings=SamplingSettings(temperature=0), limits=limits)
        times.append(seconds(lambda request=request: list(engine.submit(request))))
    gc.unfreeze()
    engine.close()
    return statistics.median(times) * 1e6


def tree() -> None:
    def fork_and_rewind(engine: Engine, length: int) -> tuple[float, float]:
        trunk = engine.tree.open(list(range(length)))
        engine.tree.reserve(trunk, length)
        engine.tree.advance(trunk, length)
        forks: list[Any] = []
        fork_s = seconds(lambda: forks.extend(engine.tree.fork(trunk) for _ in range(50)))
        rewind_s = seconds(lambda: [engine.tree.rewind(fork, length - 3) for fork in forks])
        return fork_s / 50 * 1e6, rewind_s / 50 * 1e6

    print("fork and rewind, µs, by the length of the text")
    for length in (100, 8_000, 100_000):
        engine = Engine(NullBackend(1))
        fork, rewind = engine.call(partial(fork_and_rewind, engine, length))
        print(f"  {length:>6} tokens: fork {fork:8.1f}   rewind by 3 {rewind:8.1f}")
        engine.close()


def states() -> None:
    """Random models with the layers of LFM2, Qwen3.5 and Granite 4, but smaller."""
    sys.path.insert(0, TESTS)
    from helpers.paged_texts import RandomCheckpoint, config
    from unspool.backends.cpu.model import CpuModel
    from unspool.model.config import Recurrence

    widths = {"conv_kernel": 4, "key_width": 128}
    mamba = Recurrence(key_heads=1, value_heads=16, value_width=64, conv_bias=True, **widths)
    delta = Recurrence(key_heads=8, value_heads=8, value_width=128, **widths)
    kinds: dict[str, tuple[tuple[str, ...], Recurrence]] = {
        "convolutions (LFM2)": (("conv", "conv", "attention", "conv"), Recurrence(conv_kernel=3)),
        "gated DeltaNet (Qwen3.5)": (("delta", "delta", "delta", "attention"), delta),
        "Mamba-2 (Granite 4)": (("mamba2", "mamba2", "mamba2", "attention"), mamba),
    }
    length, random = 12_000, np.random.default_rng(0)
    for name, (mixers, recurrence) in kinds.items():
        shape = config(
            layers=8, width=512, ff_width=1536, heads=8, kv_heads=2, head_width=64,
            vocab_size=4096, context=16_384, mixers=mixers * 2, recurrence=recurrence,
        )  # fmt: skip
        model = CpuModel(RandomCheckpoint(shape, "Q8_0"), store=None, threads=2, kv_bits=16)
        backend: Any = model.backend(memory=1 << 30, context=16_384)
        num_tokens = 0

        def launch(batch: StepBatch, original: Any = backend.launch) -> Any:
            nonlocal num_tokens
            num_tokens += len(batch.tokens)
            return original(batch)

        backend.launch = launch
        engine = Engine(backend)
        pool = engine.tree.states
        assert pool is not None
        branch = engine.open(random.integers(0, 4096, length).tolist())
        prefill_s = seconds(partial(engine.extend, branch))
        state, page = backend.state_bytes / 2**20, backend.page_bytes / 2**20
        print(
            f"{name}: a state {state:.2f} MiB, a page of 16 tokens {page:.3f}, {pool.count} slots; "
            f"{length:,} tokens read in {prefill_s:.1f} s, {pool.used} states stored "
            f"({pool.used * state:.1f} MiB, and {engine.tree.pool.used * page:.1f} of pages)"
        )
        for back in (1, 100, 10_000):
            times, again = list[float](), list[int]()
            for _ in range(5):
                fork = branch.fork()
                fork.rewind(length - back - int(random.integers(0, 1 + back // 10)))
                num_tokens = 0
                times.append(seconds(partial(engine.extend, fork, [7])))
                again.append(num_tokens - 1)
                fork.release()
            print(
                f"  rewound by {back:>6,} tokens: {statistics.median(again):6,.0f} computed again "
                f"({min(again):,} to {max(again):,}), {statistics.median(times) * 1e3:8.1f} ms"
            )
        engine.close()


def guard() -> None:
    lm = unspool.load()
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 150, "end": False, "top": 0}
    print("greedy, 150 tokens: share of repeated 4-grams, without and with --guard loop")
    rates = []
    for prompt in PROMPTS:
        plain = lm.generate(prompt, explain=False, **options)
        guarded = lm.generate(prompt, explain=False, guard="loop", **options)
        before, after = repetition_rate(plain.tokens), repetition_rate(guarded.tokens)
        repairs = sum(note.startswith("rewound") for note in guarded.notes)
        rates.append((before, after))
        print(f"  {prompt!r:<34} {before:.2f} -> {after:.2f}   {repairs} repairs")
    loops = [(before, after) for before, after in rates if before > 0.4]
    halved = sum(after < before / 2 for before, after in loops)
    before, after = (statistics.mean(values) for values in zip(*loops, strict=True))
    print(
        f"  {len(loops)} of {len(rates)} loop; at least halved in {halved}; "
        f"mean {before:.2f} -> {after:.2f}"
    )


PARTS = {"overhead": overhead, "host": host, "tree": tree, "states": states, "guard": guard}

if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("parts", nargs="*", type=one_of(PARTS), metavar="PART")
    for part in parser.parse_args().parts or PARTS:
        PARTS[part]()
