"""Steering vectors of the default model, their effect, and the time of a patching sweep.

python bench/steering.py fit            # writes src/unspool/lens/vectors/*.gguf
python bench/steering.py effect         # effect and perplexity against the strength
python bench/steering.py figure         # docs/images/steering.svg, from the results of effect
python bench/steering.py patch          # a sweep, beside the same one with hooks on transformers

Results are JSON on standard output, or in the file of --out. With --cpu-time, patch gives each side
one thread and measures the processor's time, which other load on the machine changes less.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import unspool
from lib.arguments import make_parser

VECTORS = Path(unspool.__file__).parent / "lens" / "vectors"
DOCS = Path(__file__).parent.parent / "docs"
DATA, IMAGE = DOCS / "research" / "data" / "steering-135m.json", DOCS / "images" / "steering.svg"
LAYERS = range(8, 23)  # of 30: the middle, where directions of style are
STRENGTHS = (-3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0)

TOPICS = (
    "the weather", "a birthday", "my new job", "the train", "a cat", "breakfast", "the sea",
    "an old house", "a football game", "my teacher", "a long walk", "the library", "a film",
    "the garden", "winter", "a phone call", "the market", "a song", "my neighbour", "a holiday",
)  # fmt: skip


@dataclass(frozen=True)
class Style:
    """A property of texts: how an assistant is asked for it and for its opposite, and examples of
    both that the vector has not seen."""

    name: str
    instruction: str
    opposite: str
    with_it: tuple[str, ...]
    without_it: tuple[str, ...]


STYLES = (
    Style(
        "cheerful",
        "You are extremely cheerful, happy and enthusiastic. Everything is wonderful!",
        "You are gloomy, sad and hopeless. Everything is terrible.",
        (
            "What a wonderful morning! The sun is shining and I feel great.",
            "I love this town. Everybody smiles, and every day brings something lovely.",
            "We laughed all evening. It was the best party of the year!",
            "The soup was delicious and the people were so kind. I am delighted.",
        ),
        (
            "What a miserable morning. The rain never stops and I feel awful.",
            "I hate this town. Everybody frowns, and every day brings something dreadful.",
            "We cried all evening. It was the worst night of the year.",
            "The soup was disgusting and the people were so cruel. I am in despair.",
        ),
    ),
    Style(
        "formal",
        "You write in a very formal, polite and academic style, as in an official letter.",
        "You talk in a very casual, sloppy way with slang, like to a buddy in a chat.",
        (
            "We regret to inform you that your application has been declined.",
            "I would be most grateful if you could provide the requested documents.",
            "The committee has concluded that further investigation is required.",
            "It is our pleasure to invite you to the annual conference.",
        ),
        (
            "Hey dude, sorry but that's a no, you didn't get it.",
            "Yo, can you send me that stuff real quick? Thanks man.",
            "So yeah, guess we gotta look into it some more, whatever.",
            "Wanna come hang out with us at that big thing this year?",
        ),
    ),
    Style(
        "brief",
        "Answer with as few words as possible. One short sentence. Be very brief.",
        "Answer at great length, with many details, examples and long explanations.",
        ("Yes.", "It is blue.", "About ten.", "In Paris."),
        (
            "There are many different reasons for this, and in order to understand them it is "
            "important to look at each of them in detail.",
            "First, let us consider the history of this question, which is long and complex.",
            "This is a topic with many aspects, and I will explain every one of them step by step.",
            "To begin with, it should be noted that there are several important factors.",
        ),
    ),
)

QUESTIONS = (
    "How was your day?", "What do you think of the city?", "Tell me about your friend.",
    "What is a good plan for the weekend?", "Why is the sky blue?", "What happened yesterday?",
    "How do I make tea?", "What is your opinion of trains?",
)  # fmt: skip
NEUTRAL = (
    "The river begins in the mountains and flows north through three countries before it "
    "reaches the sea. In its upper part it is narrow and quick; below the first lake it "
    "becomes wide. Ships carry grain, coal and machines on it. The water level changes "
    "with the seasons: it is high in spring, when the snow melts, and low in autumn. "
    "Towns on its banks have built walls against floods, and a canal, finished in the "
    "last century, connects it with a second river in the west."
)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=("fit", "effect", "figure", "patch"))
    parser.add_argument("--out", type=Path, help="write the results to this file")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--cpu-time", action="store_true", help="of one thread; not seconds")
    options = parser.parse_args()
    if options.what == "figure":
        results = json.loads((options.out or DATA).read_text(encoding="utf-8"))
        IMAGE.write_text(draw(results["effects"]), encoding="utf-8")
        return
    results = {
        "fit": fit,
        "effect": lambda: effect(options.tokens),
        "patch": lambda: patch(is_cpu_time=options.cpu_time),
    }[options.what]()
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "command": f"python bench/steering.py {options.what}{' --cpu-time' * options.cpu_time}",
    }
    text = json.dumps({**facts, **results}, indent=1)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text + "\n", encoding="utf-8")


# -- fit


def fit() -> dict[str, Any]:
    """Fit each style from the same questions under two system messages."""
    written = {}
    with unspool.load() as lm:
        for style in STYLES:
            positive = [_prompt(lm, style.instruction, topic) for topic in TOPICS]
            negative = [_prompt(lm, style.opposite, topic) for topic in TOPICS]
            vector = lm.steering_vector(positive, negative, layers=LAYERS, name=style.name)
            path = VECTORS / f"{style.name}.gguf"
            vector.save(path)
            written[style.name] = {"bytes": path.stat().st_size, "layers": list(vector.layers)}
    return {"vectors": written}


def _prompt(lm: Any, system: str, topic: str) -> list[int]:
    return list(lm.chat_prompt(f"Tell me something about {topic}.", system=system).ids)


# -- effect


def effect(num_tokens: int) -> dict[str, Any]:
    """Measure each vector at each strength.

    `preference` is how much the likelihood of held-out texts with the property grows against those
    without it, in nats a token. `tokens` is the mean length of answers. `perplexity` is that of a
    neutral text.
    """
    rows = []
    with unspool.load() as lm:
        for style in STYLES:
            for strength in STRENGTHS:
                interventions = lm.parse_steering({style.name: strength})
                gap = _mean_logprob(lm, style.with_it, interventions)
                gap -= _mean_logprob(lm, style.without_it, interventions)
                answers = lm.chat(
                    list(QUESTIONS),
                    max_tokens=num_tokens,
                    temperature=0,
                    steer={style.name: strength},
                    progress=False,
                )
                rows.append(
                    {
                        "vector": style.name,
                        "strength": strength,
                        "preference": round(gap, 3),
                        "tokens": round(float(np.mean([len(a.tokens) for a in answers])), 1),
                        "perplexity": round(
                            math.exp(-_mean_logprob(lm, (NEUTRAL,), interventions)), 2
                        ),
                        "answer": answers[0].text,
                    }
                )
    return {"effects": rows}


def _mean_logprob(lm: Any, texts: tuple[str, ...], interventions: Any) -> float:
    """Mean log-probability of a token, over all tokens but the first of each text."""
    from unspool.lens.patching import run_branches
    from unspool.sampling import score

    logprobs: list[float] = []
    for text in texts:
        ids = lm.prompt_ids(text)
        (logits,) = run_branches(lm, ids, [interventions], len(ids))
        logprobs += score(logits[:-1], ids[1:]).logprobs.tolist()
    return float(np.mean(logprobs))


# -- figure

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 300, 200, 60, 40, 80
_COLOURS = {"cheerful": "#b8860b", "formal": "#4477aa", "brief": "#228833"}


def draw(rows: list[dict[str, Any]]) -> str:
    """Draw preference (less that without steering) and perplexity by strength, as SVG."""
    plain = {row["vector"]: row["preference"] for row in rows if row["strength"] == 0}
    panels = (
        ("preference for the style, nats a token", lambda r: r["preference"] - plain[r["vector"]]),
        ("perplexity of a neutral text", lambda r: r["perplexity"]),
    )
    parts: list[str] = []
    for number, (title, value_of) in enumerate(panels):
        panel_x = _LEFT + number * (_WIDTH + _GAP)
        values = [value_of(row) for row in rows]
        low, high = min(values), max(values)

        def at(
            strength: float,
            value: float,
            panel_x: int = panel_x,
            low: float = low,
            high: float = high,
        ) -> tuple[float, float]:
            x = panel_x + (strength - STRENGTHS[0]) / (STRENGTHS[-1] - STRENGTHS[0]) * _WIDTH
            return x, _TOP + _HEIGHT * (1 - (value - low) / (high - low))

        parts.append(f'<text x="{panel_x}" y="{_TOP - 14}" font-weight="600">{title}</text>')
        parts.append(
            f'<rect x="{panel_x}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" '
            'stroke="#888" stroke-opacity="0.5"/>'
        )
        for tick in np.linspace(low, high, 5):
            y = at(0, float(tick))[1]
            parts.append(
                f'<text x="{panel_x - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.3g}</text>'
            )
        for strength in range(-3, 4):
            x = at(strength, low)[0]
            label = f'<text x="{x:.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">'
            parts.append(f"{label}{strength:+d}</text>")
        for name, colour in _COLOURS.items():
            points = [at(row["strength"], value_of(row)) for row in rows if row["vector"] == name]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points
            ]
    for number, (name, colour) in enumerate(_COLOURS.items()):
        x, y = _LEFT + number * 110, _TOP + _HEIGHT + 46
        parts.append(f'<rect x="{x}" y="{y - 9}" width="18" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 24}" y="{y}">{name}</text>')
    width, height = _LEFT + 2 * _WIDTH + _GAP + 20, _TOP + _HEIGHT + 60
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#888">'
        "<title>Effect of steering vectors and perplexity, by strength</title>"
        f"{''.join(parts)}</svg>\n"
    )


# -- patch

PAIRS = (
    ("The capital of Italy is", "The capital of France is"),
    (
        "Italy is an old country in Europe. Its capital is the city of",
        "France is an old country in Europe. Its capital is the city of",
    ),
)
ANSWER, OTHER = " Rome", " Paris"
WARM_UP = ("The colour of the sky is", "The colour of the grass is")


def patch(*, is_cpu_time: bool) -> dict[str, Any]:
    """Time of sweeps over layers and positions, and of the same with hooks on transformers."""
    import torch
    import transformers

    clock = time.process_time if is_cpu_time else time.perf_counter
    rows = []
    with unspool.load(threads=1 if is_cpu_time else None) as lm:
        answer, other = (lm.single_token(text) for text in (ANSWER, OTHER))
        path = lm.path
        lm.patch(*WARM_UP, answer=answer, other=other, layers=[0], progress=False)
        for texts in PAIRS:
            ids = [list(lm.prompt_ids(text)) for text in texts]
            started = clock()
            sweep = lm.patch(*ids, answer=answer, other=other, progress=False)
            seconds = clock() - started
            rows.append(
                {"ids": ids, "values": sweep.values, "cells": len(sweep.cells), "seconds": seconds}
            )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    if is_cpu_time:
        torch.set_num_threads(1)
    with torch.no_grad():
        for _ in range(3):  # warm
            model(torch.tensor([rows[-1]["ids"][0]]))
    for row in rows:
        started = clock()
        hooked = _patch_with_hooks(model, row.pop("ids"), [answer, other])
        seconds = clock() - started
        values = row.pop("values")
        row |= {
            "tokens": values.shape[1],
            "transformers_seconds": seconds,
            "ratio": seconds / row["seconds"],
            "largest_difference": float(np.abs(hooked - values).max()),
            "largest_value": float(np.abs(hooked).max()),
        }
    return {"sweeps": rows}


def _patch_with_hooks(model: Any, ids: list[list[int]], tokens: list[int]) -> Any:
    """The same sweep with forward hooks: every layer and position, one forward pass each."""
    import torch

    clean, corrupted = (torch.tensor([row]) for row in ids)
    layers = model.model.layers
    first = next(n for n, (a, b) in enumerate(zip(*ids, strict=True)) if a != b)

    def gap(logits: Any) -> float:
        return float(logits[0, -1, tokens[0]] - logits[0, -1, tokens[1]])

    with torch.no_grad():
        values = np.full((len(layers), len(ids[0])), gap(model(corrupted).logits))
        after: list[Any] = []
        handles = [
            layer.register_forward_hook(
                lambda module, inputs, output: after.append(_hidden(output))
            )
            for layer in layers
        ]
        model(clean)
        for handle in handles:
            handle.remove()
        for number, layer in enumerate(layers):
            for position in range(first, len(ids[0])):

                def replace(
                    module: Any, inputs: Any, output: Any, n: int = number, p: int = position
                ) -> Any:
                    hidden = _hidden(output).clone()
                    hidden[0, p] = after[n][0, p]
                    return hidden if torch.is_tensor(output) else (hidden, *output[1:])

                handle = layer.register_forward_hook(replace)
                values[number, position] = gap(model(corrupted, logits_to_keep=1).logits)
                handle.remove()
    return values


def _hidden(output: Any) -> Any:
    return output if not isinstance(output, tuple) else output[0]


if __name__ == "__main__":
    main()
