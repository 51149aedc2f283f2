"""A training run as the trainer leaves it, made in a second: random tiny models, a made-up log."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from helpers import tiny
from unspool.train.running.runs import Run, milestone_steps, process_facts

STEPS = 200
TOKENS_A_STEP = 512
_SPECIAL = ("<pad>", "<s>", "</s>")


def make_run(
    root: Path, name: str = "speeches", *, state: str = "done", until: int = STEPS, **facts: Any
) -> Run:
    """A run of STEPS steps that has come so far; the checkpoints of the film are there."""
    run = Run.create(
        root / name,
        "new",
        steps=STEPS,
        settings={"source": "speeches.txt", "depth": 2, "minutes": 1.0, "seed": 0},
        data={"documents": 12, "tokens": 90_000, "bytes_per_token": 3.4},
        **facts,
    )
    log_steps(run, 1, until)
    for step in milestone_steps(STEPS):
        if step <= until:
            add_checkpoint(run, step)
            run.write_sample(
                {"step": step, "prompt": "The", "seed": 0, "text": f" people at step {step}"}
            )
    run.update(state=state)
    return run


def going(run: Run) -> None:
    """Have it look as if this very process trained it."""
    run.update(state="running", **process_facts())


def log_steps(run: Run, first: int, last: int) -> None:
    """Append log lines as the training loop writes them."""
    lines = []
    for step in range(first, last + 1):
        line: dict[str, Any] = {
            "step": step,
            "tokens": step * TOKENS_A_STEP,
            "loss": loss(step) + 0.15 * math.sin(step * 1.7),
            "lr": 0.01,
            "grad_norm": 1.0,
            "tokens_per_second": 20_000.0,
            "seconds": step * 0.05,
        }
        lines.append(json.dumps(line) + "\n")
        if step % 20 == 0:
            judged = {"held_out_loss": loss(step) + 0.1, "bits_per_byte": bits_per_byte(step)}
            lines.append(json.dumps({"step": step, **judged}) + "\n")
    with (run.folder / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write("".join(lines))


def loss(step: int) -> float:
    return 2.0 + 3.5 * math.exp(-step / 40)


def bits_per_byte(step: int) -> float:
    return (loss(step) + 0.1) / math.log(2) / 3.4


def add_checkpoint(run: Run, step: int, seed: int | None = None) -> None:
    """A whole model folder: random weights, other ones at every step."""
    part = run.folder / "checkpoints" / f".{step:06d}.part"
    tiny.make("qwen3", seed=step if seed is None else seed).save_pretrained(part)
    _tokenizer().save(str(part / "tokenizer.json"))
    config = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (part / "tokenizer_config.json").write_text(json.dumps(config))
    training = {
        "step": step, "tokens": step * TOKENS_A_STEP, "held_out_loss": loss(step) + 0.1
    }  # fmt: skip
    (part / "training.json").write_text(json.dumps(training))
    part.replace(run.folder / "checkpoints" / f"{step:06d}")


def _tokenizer() -> Tokenizer:
    """One token a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: number for number, token in enumerate([*_SPECIAL, *letters])}
    result = Tokenizer(models.BPE(ids, []))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([AddedToken(item, special=True) for item in _SPECIAL])
    return result
