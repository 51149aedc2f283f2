"""What the engine costs, and what sharing saves: python bench/engine.py [PART ...]

overhead  microseconds a step of the engine alone, with a model that does nothing
ahead     the same one step ahead of a device, as on a GPU, at 256 texts of 128 + 128 tokens
host      the same with the GPU's backend, whose kernels are left out (no GPU needed)
batch     tokens a second at 1, 4 and 16 texts at once, beside transformers (same weights, fp32)
tree      what a fork and a rewind cost, against the length of the text (should be flat)
states    recurrent models: what a rewind computes again, and what the states of a text take
reuse     time to the first token of the second turn of a chat, against the first
guard     how often the default model loops under greedy decoding, and how often it is repaired

Without a name, all of them. Ratios are medians of paired runs, one after the other.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import unspool
from unspool.backends.step import CompletedStep, StepBatch, StepLimits, StepResult, empty_ints
from unspool.engine.engine import Engine
from unspool.engine.request import Limits, Request
from unspool.sampling import SamplingSettings
from unspool.sampling.monitors import repetition_rate
from unspool.sampling.picker import pick_tokens

VOCABULARY = 49_152
LOOPING = [
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


class Nothing:
    """A backend that gives the same logits whatever it is asked.

    With `picks` it draws from them as a real backend does; otherwise it gives a token at once, so
    that what remains is Python's share of a step.
    """

    page_size, page_bytes, overlaps, echoes = 16, 1, False, False
    limits, state_bytes, state_count = StepLimits(), 0, 0

    def __init__(
        self, rows: int, picks: bool = True, pages: int = 20_000, context: int = 120_000
    ) -> None:
        self.page_count, self.context, self.vocab_size = pages, context, VOCABULARY
        chance = np.random.default_rng(0)
        self.logits = chance.standard_normal((rows, VOCABULARY)).astype(np.float32) * 4
        self.picks, self.tokens, self.logprobs = picks, np.arange(rows), np.zeros(rows)

    def set_adapter(self, number: int, adapter: Any) -> None:
        raise NotImplementedError

    def launch(self, batch: StepBatch) -> CompletedStep:
        count = len(batch.sample_indices)
        given = self.logits[: len(batch.logits_indices)]
        if batch.sampling is None:
            return CompletedStep(StepResult(empty_ints(), self.logprobs[:0], given))
        if not self.picks:
            return CompletedStep(StepResult(self.tokens[:count], self.logprobs[:count], given))
        found = pick_tokens(self.logits[:count], batch.sampling, threads=2)
        return CompletedStep(StepResult(found.tokens, found.logprobs, given))


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def write_many(engine: Engine, rows: int, count: int, look: Any, options: Any) -> None:
    asked = [
        Request(
            prompt=(1, 2, 3),
            settings=SamplingSettings(seed=n, **options),
            limits=Limits(max_tokens=count, context=100_000, **look),
        )
        for n in range(rows)
    ]
    for stream in [engine.submit(one) for one in asked]:
        for _ in stream:
            pass


def overhead() -> None:
    print("the engine alone, µs a step (null model, vocabulary 49,152)")
    ways: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
        "Python's share, greedy": ({"temperature": 0}, {}, False),
        "Python's share, default": ({}, {}, False),
        "with picking, greedy": ({"temperature": 0}, {}, True),
        "with picking, default": ({}, {}, True),
        "explained, default": ({}, {"explain": True}, True),
        "explained, top 20 told": ({}, {"explain": True, "top": 20}, True),
    }
    for name, (options, look, picks) in ways.items():
        cells = []
        for rows in (1, 16, 64, 256):
            engine = Engine(Nothing(rows, picks), lambda token: b"x")
            count = (400 if picks else 2000) // rows + 8
            work = partial(write_many, engine, rows, count, look, options)
            work()
            step = min(seconds(work) for _ in range(3)) / count * 1e6
            cells.append(f"{rows}: {step:,.0f} ({step / rows:,.0f} a token)")
            engine.close()
        print(f"  {name:<24} {';  '.join(cells)}")


def ahead() -> None:
    """Where a device computes the next step meanwhile: the engine alone, and `lm.generate`."""
    from serving.null_server import CONTEXT, NullLoaded

    rows, count = 256, 128
    prompts = [[n + 1] * 128 for n in range(rows)]
    ways: dict[str, Any] = {
        "greedy": {"temperature": 0},
        "default": {},
        "top-p .95, penalty": {"top_p": 0.95, "frequency_penalty": 0.5},
        "16 of 256 explained": {},
    }
    print(f"{rows} texts of 128 + {count} tokens, one step ahead (null device)")
    for step_s in (0.0, 0.0049):
        for name, options in ways.items():
            lm = unspool.LanguageModel(NullLoaded(step_s), None, context=CONTEXT)

            def alone(lm: Any = lm, name: str = name, options: Any = options) -> None:
                streams = [
                    lm.stream(
                        prompt, max_tokens=count, explain="explained" in name and n % 16 == 0,
                        end=False, **options,
                    )
                    for n, prompt in enumerate(prompts)
                ]  # fmt: skip
                for n, stream in enumerate(streams):
                    if n % 16 or "explained" not in name:  # how the others fare beside them
                        for _ in stream:
                            pass

            def public(lm: Any = lm, options: Any = options) -> None:
                lm.generate(prompts, max_tokens=count, end=False, progress=False, **options)

            cells = []
            for way, work in (("stream", alone), ("generate", public)):
                work()
                took = min(seconds(work) for _ in range(3))
                tokens = rows * count
                cells.append(
                    f"{way} {took / tokens * 1e6:5.1f} µs a token, {tokens / took:7,.0f}/s"
                )
            print(f"  {step_s * 1e3:.1f} ms a step, {name:<20} {';  '.join(cells)}")
            lm.close()


def host() -> None:
    """The whole way of a step on the host, as on a GPU, and the backend's share of it."""
    import os

    os.environ.setdefault("TRITON_INTERPRET", "1")
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from helpers.cuda_support import ours
    from helpers.paged_texts import RandomCheckpoint, config

    loaded: Any = ours(RandomCheckpoint(config(vocab_size=VOCABULARY, layers=1, context=2048)))
    print("the host's share of a step on a GPU, µs (kernels left out)")
    for name, options in {
        "greedy": {"temperature": 0},
        "default": {},
        "penalty": {"frequency_penalty": 0.5},
    }.items():
        cells = []
        for rows in (1, 16, 256):
            backend = loaded.backend(memory=256 << 20, context=2048)
            backend._graphs.run = lambda key, launch: None
            spent = {"launch": 0.0, "result": 0.0}
            usual, steps = backend.launch, 0

            def launch(batch: StepBatch, usual: Any = usual, spent: Any = spent) -> Any:
                nonlocal steps
                steps += 1
                began = time.perf_counter()
                flight = usual(batch)
                result, now = flight.result, time.perf_counter()
                spent["launch"] += now - began
                outcome = result()
                spent["result"] += time.perf_counter() - now
                return CompletedStep(outcome)

            backend.launch = launch
            engine, count = Engine(backend, lambda token: b"x"), 1500 if rows == 1 else 128
            work = partial(write_many, engine, rows, count, {}, options)
            work()
            best: tuple[float, ...] = (1e9,)
            for _ in range(5):
                spent.update(launch=0.0, result=0.0)
                steps = 0
                took = seconds(work)
                best = min(best, tuple(t / steps * 1e6 for t in (took, *spent.values())))
            cells.append(f"{rows}: {best[0]:,.0f} (launch {best[1]:.0f}, result {best[2]:.0f})")
            engine.close()
        print(f"  {name:<10} {';  '.join(cells)}")


def batch() -> None:
    import torch
    import transformers

    lm = unspool.load()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    assert lm.path is not None
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        lm.path.parent, gguf_file=lm.path.name, dtype=torch.float32
    ).eval()
    prompt, count = lm.tokenizer.encode("The history of the world " * 12)[:64], 32
    print("tokens/s, prompts of 64, 32 new tokens each, greedy, fp32")
    for rows in (1, 4, 16):
        ratios, speeds = [], []
        for _ in range(3):
            lm.engine.call(lm.engine.tree.index.clear)

            def ours(rows: int = rows) -> None:
                options: dict[str, Any] = {"temperature": 0, "end": False, "top": 0}
                # Different first tokens, so that nothing is shared.
                texts = [
                    lm.begin([n + 20, *prompt[1:]], max_tokens=count, explain=False, **options)
                    for n in range(rows)
                ]
                for generation, steps in texts:
                    list(generation.extend(steps))

            def transformers_do(rows: int = rows) -> None:
                ids = torch.tensor([[n + 20, *prompt[1:]] for n in range(rows)])
                with torch.inference_mode():
                    theirs.generate(
                        ids, max_new_tokens=count, do_sample=False, eos_token_id=-1,
                        pad_token_id=0, attention_mask=torch.ones_like(ids),
                    )  # fmt: skip

            mine = seconds(ours)
            ratios.append(seconds(transformers_do) / mine)
            speeds.append(rows * count / mine)
        print(
            f"  {rows:>2} at once: {statistics.median(speeds):6.1f}, "
            f"{statistics.median(ratios):.2f}x transformers "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )


def fork_and_rewind(engine: Engine, length: int) -> tuple[float, float]:
    """Microseconds for a fork, and for a rewind by three tokens."""
    trunk = engine.tree.open(list(range(length)))
    engine.tree.reserve(trunk, length)
    engine.tree.advance(trunk, length)
    forks: list[Any] = []
    forked = seconds(lambda: forks.extend(engine.tree.fork(trunk) for _ in range(50)))
    rewound = seconds(lambda: [engine.tree.rewind(fork, length - 3) for fork in forks])
    return forked / 50 * 1e6, rewound / 50 * 1e6


def tree() -> None:
    print("fork and rewind, µs, against the length of the text")
    for length in (100, 8_000, 100_000):
        engine = Engine(Nothing(1))
        forked, rewound = engine.call(partial(fork_and_rewind, engine, length))
        print(f"  {length:>6} tokens: fork {forked:8.1f}   rewind by 3 {rewound:8.1f}")
        engine.close()


def states() -> None:
    """Random models of the kinds of LFM2, Qwen3.5 and Granite 4, smaller than these."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from helpers.paged_texts import RandomCheckpoint, config
    from unspool.backends.cpu.model import CpuModel
    from unspool.model.config import Recurrence

    mamba = Recurrence(
        conv_kernel=4, key_heads=1, value_heads=16, key_width=128, value_width=64, conv_bias=True
    )
    delta = Recurrence(conv_kernel=4, key_heads=8, value_heads=8, key_width=128, value_width=128)
    kinds: dict[str, dict[str, Any]] = {
        "convolutions (LFM2)": {
            "mixers": ("conv", "conv", "attention", "conv") * 2,
            "recurrence": Recurrence(conv_kernel=3),
        },
        "gated DeltaNet (Qwen3.5)": {
            "mixers": ("delta", "delta", "delta", "attention") * 2,
            "recurrence": delta,
        },
        "Mamba-2 (Granite 4)": {
            "mixers": ("mamba2", "mamba2", "mamba2", "attention") * 2,
            "recurrence": mamba,
        },
    }
    length, chance = 12_000, np.random.default_rng(0)
    for name, layers in kinds.items():
        shape = config(
            layers=8, width=512, ff_width=1536, heads=8, kv_heads=2, head_width=64,
            vocab_size=4096, context=16_384, **layers,
        )  # fmt: skip
        model = CpuModel(RandomCheckpoint(shape, "Q8_0"), store=None, threads=2, kv_bits=16)
        backend: Any = model.backend(memory=1 << 30, context=16_384)
        read, launch = 0, backend.launch

        def counted(batch: StepBatch, launch: Any = launch) -> Any:
            nonlocal read
            read += len(batch.tokens)
            return launch(batch)

        backend.launch = counted
        engine = Engine(backend)
        pool = engine.tree.states
        assert pool is not None
        branch = engine.open(chance.integers(0, 4096, length).tolist())
        whole = seconds(partial(engine.extend, branch))
        state, page = backend.state_bytes / 2**20, backend.page_bytes / 2**20
        print(
            f"{name}: a state {state:.2f} MiB, a page of 16 tokens {page:.3f}, {pool.count} slots; "
            f"{length:,} tokens read in {whole:.1f} s, {pool.used} states kept "
            f"({pool.used * state:.1f} MiB, beside {engine.tree.pool.used * page:.1f} of pages)"
        )
        for back in (1, 100, 10_000):
            took, again = list[float](), list[int]()
            for _ in range(5):
                fork = branch.fork()
                place = length - back - int(chance.integers(0, 1 + back // 10))
                fork.rewind(place)
                read = 0
                took.append(seconds(partial(engine.extend, fork, [7])))
                again.append(read - 1)
                fork.release()
            print(
                f"  taken back {back:>6,} tokens: {statistics.median(again):6,.0f} computed again "
                f"({min(again):,} to {max(again):,}), {statistics.median(took) * 1e3:8.1f} ms"
            )
        engine.close()


def reuse() -> None:
    from unspool.conversation import Conversation

    lm = unspool.load()
    question = "Tell me about the leaves of trees, and why they change. " * 12
    first, second = [], []
    for number in range(5):
        lm.engine.call(lm.engine.tree.index.clear)
        talk = Conversation(lm, f"You are helper number {number}.")
        times = []
        for words in (question, "And in spring?"):
            generation, steps = talk.ask(words, max_tokens=24, temperature=0, top=0, explain=False)
            list(steps)
            times.append(generation.usage.first_token_seconds)
        first.append(times[0])
        second.append(times[1])
    ratio = statistics.median(a / b for a, b in zip(first, second, strict=True))
    print(
        f"first token of turn 1: {statistics.median(first):.3f} s ({len(generation.prompt)} tokens "
        f"by turn 2, {talk.reused} of them reused); of turn 2: {statistics.median(second):.3f} s; "
        f"{ratio:.1f}x sooner"
    )


def guard() -> None:
    lm = unspool.load()
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 150, "end": False, "top": 0}
    print("greedy, 150 tokens: share of 4-grams seen before, without and with --guard loop")
    rows = []
    for prompt in LOOPING:
        plain = lm.generate(prompt, explain=False, **options)
        guarded = lm.generate(prompt, explain=False, guard="loop", **options)
        before, after = repetition_rate(plain.tokens), repetition_rate(guarded.tokens)
        repairs = sum(note.startswith("took") for note in guarded.notes)
        rows.append((before, after, repairs))
        print(f"  {prompt!r:<34} {before:.2f} -> {after:.2f}   {repairs} repairs")
    looped = [(b, a) for b, a, _ in rows if b > 0.4]
    mended = sum(a < b / 2 for b, a in looped)
    print(f"  {len(looped)} of {len(rows)} loop; at least halved in {mended}; mean "
          f"{statistics.mean(b for b, _ in looped):.2f} -> "
          f"{statistics.mean(a for _, a in looped):.2f}")  # fmt: skip


PARTS = {
    "overhead": overhead,
    "ahead": ahead,
    "host": host,
    "tree": tree,
    "states": states,
    "batch": batch,
    "reuse": reuse,
    "guard": guard,
}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
