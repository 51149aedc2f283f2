"""What drafts gain: python bench/speculative.py [WORD]     (default: lookup; see `--speculate`)

Writes each prompt with and without drafts, in turns (so that both meet the same load), and prints
the median of the paired ratios: once for texts that copy much, once for texts that do not. The
texts are checked to be the same.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from typing import Any

import unspool
from unspool.decoding.speculative import make_drafter
from unspool.engine.ending import Limits
from unspool.engine.generation import Generation
from unspool.engine.request import Request
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


def written(lm: Any, prompt: str, drafter: Any) -> tuple[Generation, float]:
    request = Request(
        prompt=tuple(lm.tokenizer.encode(prompt)),
        settings=SamplingSettings(temperature=0),
        limits=Limits(max_tokens=TOKENS, context=lm.context),
        drafter=drafter,
    )
    generation = Generation(request)
    began = time.perf_counter()
    for _ in generation.extend(lm.engine.submit(request)):
        pass
    return generation, time.perf_counter() - began


def main(word: str) -> None:
    lm = unspool.load()
    make = make_drafter(word, lm, unspool.load)
    for prompt in (*COPYING.values(), *FREE.values()):  # read once: both sides find it computed
        lm.generate(prompt, max_tokens=1)
    print(f"{'text':22} {'plain':>8} {'drafted':>8} {'ratio':>6} {'accepted':>9}  same")
    for kind, prompts in (("copying", COPYING), ("free", FREE)):
        every = []
        for name, prompt in prompts.items():
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


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "lookup")
