"""Known results of interpretability on real models: a factual recall trace, and induction heads.

python bench/interpretability.py run [MODEL]...   # default: the default model
python bench/interpretability.py figure           # docs/images/interpretability.svg

The trace patches one activation of the clean run into the corrupted one, for each layer and
position (Meng et al. 2022, arXiv:2202.05262; here with another country in place of noise). The
prefix-matching score of a head is the attention that it pays, on repeated random tokens, to the
token after the earlier occurrence of the present one (Olsson et al. 2022, arXiv:2209.11895).
"""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

import unspool
from lib.arguments import make_parser
from unspool import Intervention, Scale

DOCS = Path(__file__).parent.parent / "docs"
DATA = DOCS / "research" / "data" / "interpretability.json"
IMAGE = DOCS / "images" / "interpretability.svg"

TEMPLATE = "The capital of {} is the city of"
CAPITALS = {
    "France": " Paris", "Italy": " Rome", "Spain": " Madrid", "Japan": " Tokyo",
    "Russia": " Moscow", "Germany": " Berlin", "China": " Beijing", "Greece": " Athens",
}  # fmt: skip
SITES = ("resid_post", "attn_out", "mlp_out")
PARTS = ("induction", *SITES)
NUM_PAIRS = 6

LENGTH, NUM_TEXTS = 40, 4  # random tokens, which are repeated once
KNOCK_OUTS = (1, 2, 4, 8, 16)
NUM_DRAWS = 3  # of random heads


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("action", choices=("run", "figure"))
    parser.add_argument("models", nargs="*", default=["default"], metavar="MODEL")
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--only", choices=PARTS, nargs="*", default=PARTS, help="parts to measure")
    arguments = parser.parse_args()
    if arguments.action == "figure":
        draw(json.loads(arguments.out.read_text(encoding="utf-8")))
        return
    results: dict[str, Any] = {}
    if arguments.out.exists():
        results = json.loads(arguments.out.read_text(encoding="utf-8"))
    results["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    results["date"] = time.strftime("%Y-%m-%d")
    for name in arguments.models:
        model = None if name == "default" else name
        with unspool.load(model, memory=256 << 20, threads=arguments.threads) as lm:
            label = Path(str(lm.path)).name
            print(label, flush=True)
            shape = {"layers": lm.config.layers, "heads": lm.config.heads}
            result = results.setdefault("models", {}).setdefault(label, shape)
            if "induction" in arguments.only:
                result["induction"] = induction(lm)
            for site in SITES:
                if site in arguments.only:
                    result.setdefault("trace", {})[site] = trace(lm, site)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


# -- a factual recall trace


def trace(lm: Any, site: str) -> dict[str, Any]:
    """The mean share of the answer that is restored, for each layer and position of a site."""
    single = [
        (country, capital)
        for country, capital in CAPITALS.items()
        if len(lm.tokenizer.encode(capital)) == len(lm.tokenizer.encode(f" {country}")) == 1
    ]
    prompts = {country: TEMPLATE.format(country) for country, _ in single}
    recalled = [
        (country, capital)
        for country, capital in single
        if lm.generate(prompts[country], max_tokens=1, temperature=0).text == capital
    ]
    pairs = list(zip(recalled, recalled[1:] + recalled[:1], strict=True))[:NUM_PAIRS]
    started = time.perf_counter()
    tables = []
    for (country, capital), (other_country, other) in pairs:
        sweep = lm.patch(
            prompts[country],
            prompts[other_country],
            answer=capital,
            other=other,
            site=site,
            progress=False,
        )
        tables.append(sweep.restored)
    seconds = time.perf_counter() - started
    print(f"{site}: {len(recalled)} of {len(single)} recalled, {seconds:.0f} s", flush=True)
    return {
        "recalled": [country for country, _ in recalled],
        "asked": len(single),
        "pairs": len(pairs),
        "positions": list(sweep.labels[1]),
        "restored": np.round(np.mean(tables, axis=0), 4).tolist(),
    }


# -- induction heads


def induction(lm: Any) -> dict[str, Any]:
    """Prefix-matching scores of all heads, and the loss without the best of them."""
    rng = np.random.default_rng(0)
    ordinary = [n for n in range(1000, min(lm.config.vocab_size, 40000)) if lm.readable(n).strip()]
    texts = [
        [int(token) for token in rng.choice(ordinary, LENGTH, replace=False)] * 2
        for _ in range(NUM_TEXTS)
    ]
    scores = np.mean([_prefix_matching(lm, text) for text in texts], axis=0)
    order = np.argsort(-scores, axis=None, kind="stable")
    heads = [divmod(int(flat), scores.shape[1]) for flat in order]
    first, second = _losses(lm, texts, [])
    knock_outs = []
    for count in KNOCK_OUTS:
        _, best = _losses(lm, texts, heads[:count])
        others = heads[len(heads) // 4 :]  # not among the quarter with the highest scores
        draws = []
        for _ in range(NUM_DRAWS):
            chosen = rng.choice(len(others), count, replace=False)
            draws.append(_losses(lm, texts, [others[n] for n in chosen])[1])
        knock_outs.append(
            {
                "heads": count,
                "loss": round(best, 4),
                "loss_random": round(float(np.mean(draws)), 4),
                "loss_random_max": round(max(draws), 4),
            }
        )
        print(knock_outs[-1], flush=True)
    return {
        "length": LENGTH,
        "texts": NUM_TEXTS,
        "scores": np.round(scores, 4).tolist(),
        "best": [
            {"layer": layer, "head": head, "score": round(float(scores[layer, head]), 4)}
            for layer, head in heads[:16]
        ],
        "loss_first": round(first, 4),
        "loss_second": round(second, 4),
        "knock_outs": knock_outs,
    }


def _prefix_matching(lm: Any, text: list[int]) -> Any:
    """Mean attention of each head from the second half to the token after the earlier occurrence.

    The last token of the first half is followed by a repeated one: it counts too.
    """
    weights = lm.activations(text, sites="pattern", positions=slice(LENGTH, None))["pattern"]
    # [layers, heads, positions, past]: position LENGTH + n looks at n + 1.
    return np.mean([weights[:, :, n, n + 1] for n in range(LENGTH)], axis=0)


def _losses(lm: Any, texts: list[list[int]], heads: list[tuple[int, int]]) -> tuple[float, float]:
    """Mean loss of the first and of the second half without some heads, in nats a token."""
    by_layer: dict[int, list[int]] = {}
    for layer, head in heads:
        by_layer.setdefault(layer, []).append(head)
    interventions = [
        Intervention("head_out", Scale(0.0), layers=layer, heads=tuple(sorted(numbers)))
        for layer, numbers in sorted(by_layer.items())
    ]
    halves = []
    for text in texts:
        logprobs = lm.score(text, interventions=interventions).logprobs
        # The first repeated token cannot be predicted.
        halves.append((-np.mean(logprobs[1:LENGTH]), -np.mean(logprobs[LENGTH + 1 :])))
    first, second = np.mean(halves, axis=0).tolist()
    return first, second


# -- the figure


def draw(results: dict[str, Any]) -> None:
    """Heatmaps of the traces and of the scores, one row for each model."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "unspool"
    from matplotlib import pyplot

    models = results["models"]
    figure, rows = pyplot.subplots(
        len(models), 4, figsize=(14, 4.2 * len(models)), squeeze=False, layout="constrained"
    )
    titles = {"resid_post": "residual stream", "attn_out": "attention", "mlp_out": "MLP"}
    for row, (name, result) in zip(rows, models.items(), strict=True):
        for axis, site in zip(row, SITES, strict=False):
            table = np.array(result["trace"][site]["restored"])
            image = axis.imshow(table, origin="lower", aspect="auto", cmap="RdBu", vmin=-1, vmax=1)
            labels = [
                label.split(" ", 1)[-1].strip("'") for label in result["trace"][site]["positions"]
            ]
            labels = ["(country)" if label.strip() in CAPITALS else label for label in labels]
            axis.set_xticks(range(len(labels)), labels, rotation=60, ha="right", fontsize=7)
            axis.set_title(f"{Path(name).stem}: {titles[site]}", fontsize=8)
            axis.set_ylabel("layer")
        figure.colorbar(image, ax=row[2], label="restored")
        scores = np.array(result["induction"]["scores"])
        image = row[3].imshow(scores, origin="lower", aspect="auto", cmap="viridis", vmin=0)
        row[3].set_title("prefix matching of each head", fontsize=8)
        row[3].set_xlabel("head")
        figure.colorbar(image, ax=row[3])
    figure.savefig(IMAGE, metadata={"Date": None})


if __name__ == "__main__":
    main()
