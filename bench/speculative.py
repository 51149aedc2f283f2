"""What drafts gain: python bench/speculative.py [WORD]     (default: lookup; see `--speculate`)

Writes each prompt with and without drafts, in turns (so that both meet the same load), and prints
the median of the paired ratios: once for texts that copy much, once for texts that do not. The
texts are checked to be the same.

    python bench/speculative.py head [--tokens 96] [--chats 12] [--device cuda]

For a trained head: tokens a pass on hand-written chats, greedy and drawn, for chains and trees of
every size, and the speed of the size that the drafter itself chooses.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import unspool
from unspool.decoding.speculative.controller import (
    SHAPES,
    DraftShape,
    FixedShape,
    RoundCosts,
    ShapeController,
)
from unspool.decoding.speculative.drafters import make_drafter
from unspool.decoding.speculative.head_drafter import HeadDrafter, load_head, shipped_head
from unspool.engine.generation import Generation
from unspool.engine.request import Limits, Request
from unspool.sampling import SamplingSettings

TOKENS = 48
PAIRS = 2

COPYING = {
    "summary with quotes": (
        "Report: The bridge over the river Alm was closed on Monday after an inspector found "
        "cracks in two of its eleven piers. The mayor said that the repair would take at least "
        "four months. Until then a ferry will carry people, but no cars.\n\n"
        'Summary, quoting the report word by word: "The bridge over the river Alm was closed'
    ),
    "code edit": (
        "# Before\ndef area(shape):\n    if shape.kind == 'circle':\n"
        "        return 3.14159 * shape.radius ** 2\n    if shape.kind == 'square':\n"
        "        return shape.side ** 2\n    raise ValueError(shape.kind)\n\n"
        "# After: the same function, renamed to surface\ndef surface(shape):\n"
        "    if shape.kind == 'circle':\n"
    ),
    "list again": (
        "Shopping list: three lemons, a bag of flour, olive oil, two onions, a bunch of parsley, "
        "black pepper, a jar of honey, six eggs.\nThe same list, read aloud: three lemons,"
    ),
}
FREE = {
    "story": "Once upon a time, in a village by the sea,",
    "opinion": "The three most important inventions of the last century are",
    "advice": "If you want to learn to play the piano as an adult, you should",
}
CHATS = (
    "Why do leaves change color in fall?",
    "Write a short letter to my landlord about a broken heater.",
    "What should I pack for three days of hiking in the mountains?",
    "Explain to a ten-year-old how a bicycle stays upright.",
    "Give me five ideas for a birthday present for my grandmother.",
    "How do I get a coffee stain out of a white shirt?",
    "Tell me a story about a lighthouse keeper who is afraid of the dark.",
    "What is the difference between a virus and a bacterium?",
    "Write a Python function that counts the vowels in a string.",
    "I have a job interview tomorrow. How can I calm down tonight?",
    "Summarize the plot of Romeo and Juliet in four sentences.",
    "Plan a simple vegetarian dinner for six people.",
)
WAYS = {
    "greedy": {"temperature": 0.0},
    "T .8, top-p .95": {"temperature": 0.8, "top_p": 0.95, "top_k": 0, "min_p": 0.0, "seed": 1},
}


def written(
    lm: Any, prompt: Sequence[int], drafter: Any, tokens: int = TOKENS, **options: Any
) -> tuple[Generation, float]:
    request = Request(
        prompt=tuple(prompt),
        settings=SamplingSettings(**{"temperature": 0.0, **options}),
        limits=Limits(max_tokens=tokens, context=lm.context, end_ids=lm.end_ids),
        drafter=drafter,
    )
    generation = Generation(request)
    began = time.perf_counter()
    for _ in generation.extend(lm.engine.submit(request)):
        pass
    return generation, time.perf_counter() - began


def paired(lm: Any, make: Any) -> None:
    """Texts that copy and texts that do not, with and without drafts in turns."""
    print(f"{'text':22} {'plain':>8} {'drafted':>8} {'ratio':>6} {'accepted':>9}  same")
    for kind, prompts in (("copying", COPYING), ("free", FREE)):
        every = []
        for name, text in prompts.items():
            prompt = lm.tokenizer.encode(text)
            written(lm, prompt, None, 1)  # read once: both sides find it computed
            ratios, plain_s, drafted_s = [], [], []
            for _ in range(PAIRS):
                plain, seconds = written(lm, prompt, None)
                drafted, quicker = written(lm, prompt, make)
                ratios.append(seconds / quicker)
                plain_s.append(len(plain.steps) / seconds)
                drafted_s.append(len(drafted.steps) / quicker)
            said = Counter(step.draft for step in drafted.steps)
            print(
                f"{name:22} {statistics.median(plain_s):6.1f}/s {statistics.median(drafted_s):6.1f}"
                f"/s {statistics.median(ratios):6.2f} {said['accepted']:5} of "
                f"{len(drafted.steps)}  {plain.tokens == drafted.tokens}"
            )
            for note in drafted.notes:
                print(f"    {note}")
            every += ratios
        print(
            f"{kind}: {statistics.median(every):.2f}x (from {min(every):.2f} to {max(every):.2f})"
        )


def with_head(lm: Any, where: str, tokens: int, chats: int) -> None:
    """A head on chats: tokens a pass for each shape, then the speed of what it chooses itself."""
    head = load_head(Path(where) if where else shipped_head(lm.model), lm)
    prompts = [lm.chat_prompt(question).ids for question in CHATS[:chats]]
    shapes = [None, *(DraftShape(size) for size in (1, 2, 3, 5, 7)), *SHAPES]
    print(f"{'':16} " + " ".join(f"{_named(shape):>9}" for shape in shapes))
    for way, options in WAYS.items():
        texts: list[list[int]] = []
        rates, speeds = [], []
        for shape in shapes:
            make = None
            if shape is not None:
                fixed = shape
                make = lambda request: HeadDrafter(head, request, FixedShape(fixed))  # noqa: B023, E731
            written(lm, prompts[0], make, 32, **options)  # compiled and captured by then
            count = passes = 0
            seconds, others = 0.0, 0
            for number, prompt in enumerate(prompts):
                lm.engine.call(lm.engine.tree.index.clear)  # everybody reads the prompt
                before = lm.engine.steps
                text, took = written(lm, prompt, make, tokens, **options)
                passes += lm.engine.steps - before - 1  # the prompt's own
                count += len(text.steps) - 1
                seconds += took
                if shape is None:
                    texts.append(text.tokens)
                others += text.tokens != texts[number]
            rates.append(count / passes)
            speeds.append(count / seconds)
            if others:  # the largest drafts on a GPU, as with any two sizes of a batch there
                print(f"{way}, {_named(shape)}: {others} of {chats} texts are others")
                assert lm.model.device != "cpu"
        print(f"{way:16} " + " ".join(f"{rate:9.2f}" for rate in rates) + "  tokens a pass")
        print(f"{'':16} " + " ".join(f"{s / speeds[0]:9.2f}" for s in speeds) + "  times the speed")
        chosen(lm, head, prompts, tokens, way, options)


def chosen(
    lm: Any, head: Any, prompts: list[list[int]], tokens: int, way: str, options: Any
) -> None:
    """The drafter's own choice of how much to draft, against no drafts, in turns."""
    costs, ratios = RoundCosts(observing_is_free=lm.model.device == "cpu"), []
    for prompt in prompts:
        lm.engine.call(lm.engine.tree.index.clear)
        plain, seconds = written(lm, prompt, None, tokens, **options)
        lm.engine.call(lm.engine.tree.index.clear)
        make = lambda request: HeadDrafter(head, request, ShapeController(costs))  # noqa: E731
        drafted, quicker = written(lm, prompt, make, tokens, **options)
        ratios.append(seconds / quicker * len(drafted.steps) / len(plain.steps))
        assert plain.tokens == drafted.tokens or lm.model.device != "cpu"
    shape = SHAPES[costs.size] if not costs.paused else None
    print(
        f"{'':16} by its own measure: {statistics.median(ratios):.2f}x (from {min(ratios):.2f} to "
        f"{max(ratios):.2f}), at the end {_named(shape)}"
    )


def _named(shape: DraftShape | None) -> str:
    if shape is None:
        return "none"
    if shape.width > 1:
        return f"tree {shape.nodes}"
    return f"sure {shape.min_probability}" if shape.min_probability else f"chain {shape.nodes}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("word", nargs="?", default="lookup")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--chats", type=int, default=len(CHATS))
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    lm = unspool.load(device=given.device)
    kind, _, where = given.word.partition(":")
    if kind == "head":
        with_head(lm, where, given.tokens, given.chats)
    else:
        paired(lm, make_drafter(given.word, lm, unspool.load))


if __name__ == "__main__":
    main()
