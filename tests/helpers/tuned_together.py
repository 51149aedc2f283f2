"""Tunings of every kind on a tiny model, as one process does them and as two do them together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers import tiny
from unspool.train.data.tokenizer import TokenizerSettings, save_tokenizer_files, train_bpe
from unspool.train.running.parallel import Parallel
from unspool.train.running.runs import Run
from unspool.train.tuning.tune import TuneSettings, new_run, tune

# Name -> settings, and whether two processes are to have a part of the model each.
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "lora": ({"lora": 4}, False),
    "all-shard": ({"lora": 0, "rate": 1e-3}, True),
    "dpo-shard": ({"kind": "dpo", "lora": 4, "data": "pairs"}, True),
    "grpo": (
        {
            "kind": "grpo", "lora": 4, "data": "asked", "judge": "helpers.tuned_together:judge",
            "groups": 2, "answers": 2, "max_tokens": 4,
        },
        False,
    ),
}  # fmt: skip


def judge(prompt: str, answer: str, row: dict[str, Any]) -> float:
    return sum(letter < "a" for letter in answer) / max(1, len(answer))


def make_data(folder: Path) -> None:
    """A tiny model with a vocabulary of bytes, and something to learn for each kind."""
    tiny.save("llama", folder / "model")
    settings = TokenizerSettings(vocab_size=259)
    save_tokenizer_files(train_bpe([], settings), settings, folder / "model")
    numbers = range(24)
    rows = {
        "told": [{"prompt": f"number {n}", "completion": "x" * (n % 5 + 1)} for n in numbers],
        "pairs": [{"prompt": f"n {n}", "chosen": "yes", "rejected": "no way"} for n in numbers],
        "asked": [{"prompt": f"n {n}"} for n in numbers],
    }
    for name, content in rows.items():
        lines = "".join(json.dumps(row) + "\n" for row in content)
        (folder / f"{name}.jsonl").write_text(lines)


def tuned(folder: Path, kind: str, name: str, parallel: Parallel | None = None) -> Run:
    """One tuning, in runs/NAME."""
    changes, _ = KINDS[kind]
    given = {"data": "told", "rate": 1e-2, **changes}
    data = (str(folder / f"{given.pop('data')}.jsonl"),)
    settings = TuneSettings(
        model=str(folder / "model"), data=data, batch=4, length=64, steps=4, save_every=2,
        device="cpu", **given,
    )  # fmt: skip
    where = folder / "runs" / name
    if parallel is None or parallel.is_first:
        new_run(settings, where)
    if parallel is not None:
        parallel.wait()
    return tune(settings, Run(where), parallel=parallel)
