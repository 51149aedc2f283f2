"""Gains of drafts: python bench/speculative.py [WORD]     (default: lookup; see `--speculate`)

Writes each prompt with and without drafts, in turns, and prints the median of the paired ratios:
for texts that copy much and for texts that do not. Checks that the texts are the same.

    python bench/speculative.py mtp --model M [--tokens 96] [--chats 12] [--device cuda]
    python bench/speculative.py eagle:FOLDER --model M

For a head that reads hidden states: tokens per pass on hand-written chats, greedy and sampled, for
chains and trees of every size, and the speed with the size that the drafter chooses itself.
"""

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import unspool
from lib.arguments import add_options, make_parser
from lib.stats import spread
from unspool.decoding.speculative.controller import (
    SHAPES,
    DraftShape,
    FixedShape,
    RoundCosts,
    ShapeController,
)
from unspool.decoding.speculative.drafters import make_drafter
from unspool.decoding.speculative.eagle import load_eagle
from unspool.decoding.speculative.head_drafter import HeadDrafter
from unspool.decoding.speculative.mtp import load_mtp
from unspool.engine.generation import Generation
from unspool.engine.request import Limits, Request
from unspool.sampling import SamplingSettings

TOKENS, PAIRS = 48, 2
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
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "T .8, top-p .95": {"temperature": 0.8, "top_p": 0.95, "top_k": 0, "min_p": 0.0, "seed": 1},
}


def generate(
    lm: Any, prompt: Sequence[int], drafter: Any, tokens: int = TOKENS, **options: Any
) -> tuple[Generation, float]:
    """Write a text; return it and the seconds."""
    request = Request(
        prompt=tuple(prompt),
        settings=SamplingSettings(**{"temperature": 0.0, **options}),
        limits=Limits(max_tokens=tokens, context=lm.context, end_ids=lm.end_ids),
        drafter=drafter,
    )
    generation = Generation(request)
    start = time.perf_counter()
    for _ in generation.extend(lm.engine.submit(request)):
        pass
    return generation, time.perf_counter() - start


def compare_pairs(lm: Any, drafter: Any) -> None:
    """Texts that copy and texts that do not, with and without drafts in turns."""
    print(f"{'text':22} {'plain':>8} {'drafted':>8} {'ratio':>6} {'accepted':>9}  same")
    for kind, prompts in (("copying", COPYING), ("free", FREE)):
        all_ratios = []
        for name, text in prompts.items():
            prompt = lm.tokenizer.encode(text)
            generate(lm, prompt, None, 1)  # both find the prompt cached
            ratios, plain_rates, drafted_rates = [], [], []
            for _ in range(PAIRS):
                plain, plain_s = generate(lm, prompt, None)
                drafted, drafted_s = generate(lm, prompt, drafter)
                ratios.append(plain_s / drafted_s)
                plain_rates.append(len(plain.steps) / plain_s)
                drafted_rates.append(len(drafted.steps) / drafted_s)
            rates = [statistics.median(values) for values in (plain_rates, drafted_rates)]
            accepted = Counter(step.draft for step in drafted.steps)["accepted"]
            print(
                f"{name:22} {rates[0]:6.1f}/s {rates[1]:6.1f}/s {statistics.median(ratios):6.2f} "
                f"{accepted:5} of {len(drafted.steps)}  {plain.tokens == drafted.tokens}"
            )
            for note in drafted.notes:
                print(f"    {note}")
            all_ratios += ratios
        print(f"{kind}: {statistics.median(all_ratios):.2f}x (from {spread(all_ratios)})")


def measure_head(lm: Any, head: Any, tokens: int, chats: int) -> None:
    """Tokens per pass of a head for each shape, then the speed with its own choice."""
    prompts = [lm.chat_prompt(question).ids for question in CHATS[:chats]]
    shapes = [None, *(DraftShape(size) for size in (1, 2, 3, 5, 7)), *SHAPES]
    print(f"{'':16} " + " ".join(f"{shape_name(shape):>9}" for shape in shapes))

    def fixed(shape: DraftShape, request: Request) -> HeadDrafter:
        return HeadDrafter(head, request, FixedShape(shape))

    for name, options in SAMPLING.items():
        texts: list[list[int]] = []
        rates, speeds = [], []
        for shape in shapes:
            drafter = None if shape is None else partial(fixed, shape)
            generate(lm, prompts[0], drafter, 32, **options)  # compiles and captures
            count = passes = num_different = 0
            total_s = 0.0
            for number, prompt in enumerate(prompts):
                lm.engine.call(lm.engine.tree.index.clear)  # all compute the prompt
                before = lm.engine.steps
                text, elapsed = generate(lm, prompt, drafter, tokens, **options)
                passes += lm.engine.steps - before - 1  # without the prompt's
                count += len(text.steps) - 1
                total_s += elapsed
                if shape is None:
                    texts.append(text.tokens)
                num_different += text.tokens != texts[number]
            rates.append(count / passes)
            speeds.append(count / total_s)
            if num_different:  # large drafts on a GPU, like any two batch sizes there
                print(f"{name}, {shape_name(shape)}: {num_different} of {chats} texts differ")
                assert lm.model.device != "cpu"
        print(f"{name:16} " + " ".join(f"{rate:9.2f}" for rate in rates) + "  tokens per pass")
        print(f"{'':16} " + " ".join(f"{s / speeds[0]:9.2f}" for s in speeds) + "  times the speed")
        measure_adaptive(lm, head, prompts, tokens, options)


def measure_adaptive(
    lm: Any, head: Any, prompts: list[list[int]], tokens: int, options: Any
) -> None:
    """The drafter's own choice of the size against no drafts, in turns."""
    costs, ratios = RoundCosts(observing_is_free=lm.model.device == "cpu"), []

    def adaptive(request: Request) -> HeadDrafter:
        return HeadDrafter(head, request, ShapeController(costs))

    for prompt in prompts:
        lm.engine.call(lm.engine.tree.index.clear)
        plain, plain_s = generate(lm, prompt, None, tokens, **options)
        lm.engine.call(lm.engine.tree.index.clear)
        drafted, drafted_s = generate(lm, prompt, adaptive, tokens, **options)
        ratios.append(plain_s / drafted_s * len(drafted.steps) / len(plain.steps))
        assert plain.tokens == drafted.tokens or lm.model.device != "cpu"
    shape = SHAPES[costs.size] if not costs.paused else None
    ratio = f"{statistics.median(ratios):.2f}x (from {spread(ratios)})"
    print(f"{'':16} adaptive: {ratio}, at the end {shape_name(shape)}")


def shape_name(shape: DraftShape | None) -> str:
    if shape is None:
        return "none"
    if shape.width > 1:
        return f"tree {shape.nodes}"
    return f"sure {shape.min_probability}" if shape.min_probability else f"chain {shape.nodes}"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("word", nargs="?", default="lookup")
    add_options(
        parser, ("--model", str), ("--tokens", 96), ("--chats", len(CHATS)), ("--device", "cpu")
    )
    args = parser.parse_args()
    lm = unspool.load(args.model, device=args.device)
    kind, _, where = args.word.partition(":")
    if kind in ("eagle", "mtp"):
        head: Any = (
            load_eagle(Path(where), lm.model)
            if kind == "eagle"
            else load_mtp(lm.path, lm.model, lm.context)
        )
        measure_head(lm, head, args.tokens, args.chats)
    else:
        compare_pairs(lm, make_drafter(args.word, lm, unspool.load))


if __name__ == "__main__":
    main()
