"""The plain path beside transformers, same GGUF file, in 32 bits: python bench/plain.py [TEXT]

Loads the default model in both, each in a process of its own, and compares: time to load, peak
memory, tokens a second (interleaved rounds, medians of paired ratios), greedy text, and the
perplexity of a text file (given as the argument, or this repository's own pages).
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PROMPTS = [
    "Why do leaves change color in fall?",
    "The capital of Germany is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "The three most important inventions of the last century are",
]
TOKENS = 128
WINDOW = 512
WINDOWS = 8


class Ours:
    def __init__(self, path: Path) -> None:
        import unspool

        self.lm = unspool.load(path)

    def write(self, ids: list[int], count: int) -> list[int]:
        options: dict[str, Any] = {"temperature": 0, "end": False, "top": 0, "explain": False}
        return list(self.lm.generate(ids, max_tokens=count, **options).tokens)

    def logprobs(self, ids: list[int]) -> list[float]:
        return [p for p in self.lm.score(ids).logprobs if p is not None]


class Transformers:
    def __init__(self, path: Path) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()

    def write(self, ids: list[int], count: int) -> list[int]:
        with self.torch.inference_mode():
            found = self.model.generate(
                self.torch.tensor([ids]), max_new_tokens=count, do_sample=False,
                eos_token_id=-1, pad_token_id=0,
                attention_mask=self.torch.ones(1, len(ids), dtype=self.torch.long),
            )  # fmt: skip
        return list(found[0, len(ids) :].tolist())

    def logprobs(self, ids: list[int]) -> list[float]:
        with self.torch.inference_mode():
            logits = self.model(self.torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return list(logits.gather(1, self.torch.tensor(ids[1:])[:, None])[:, 0].tolist())


def serve(kind: str, path: Path) -> None:
    """One side: load, then answer requests on stdin."""
    began = time.perf_counter()
    engine = Ours(path) if kind == "ours" else Transformers(path)
    reply({"load": time.perf_counter() - began})
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        if asked["do"] == "write":
            found: Any = engine.write(asked["ids"], asked["count"])
        else:
            found = engine.logprobs(asked["ids"])
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        reply({"found": found, "seconds": seconds, "peak_mb": peak})


def reply(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


class Side:
    """The other end of `serve`."""

    def __init__(self, kind: str, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", kind, str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.load: float = self._hear()["load"]

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main(text_file: str | None) -> None:
    from unspool.loading import open_tokenizer
    from unspool.model.files.checkpoint import open_checkpoint
    from unspool.model.hub.find import find_model

    path = find_model(None)
    tokenizer = open_tokenizer(open_checkpoint(path))
    assert tokenizer is not None
    sides = {"ours": Side("ours", path), "transformers": Side("transformers", path)}
    print(f"load, s          ours {sides['ours'].load:.2f}   "
          f"transformers {sides['transformers'].load:.2f}")  # fmt: skip
    ratios, same, speeds = [], 0, []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        made = {name: side.ask(do="write", ids=ids, count=TOKENS) for name, side in sides.items()}
        same += made["ours"]["found"] == made["transformers"]["found"]
        ratios.append(made["transformers"]["seconds"] / made["ours"]["seconds"])
        speeds.append(TOKENS / made["ours"]["seconds"])
    print(f"greedy, {TOKENS} tokens equal on {same} of {len(PROMPTS)} prompts")
    print(f"tokens/s         ours {statistics.median(speeds):.1f}, "
          f"{statistics.median(ratios):.2f}x transformers "
          f"({min(ratios):.2f} to {max(ratios):.2f})")  # fmt: skip
    pages = [text_file] if text_file else sorted(map(str, ROOT.glob("docs/*.md")))
    text = "\n".join(Path(page).read_text(encoding="utf-8") for page in pages)
    ids = tokenizer.encode(text)
    totals = dict.fromkeys(sides, 0.0)
    count, furthest = 0, 0.0
    for start in range(0, min(len(ids) - 1, WINDOW * WINDOWS), WINDOW):
        window = ids[start : start + WINDOW]
        judged = {name: side.ask(do="score", ids=window) for name, side in sides.items()}
        for name, answer in judged.items():
            totals[name] += sum(answer["found"])
        count += len(window) - 1
        pairs = zip(judged["ours"]["found"], judged["transformers"]["found"], strict=True)
        furthest = max(furthest, *(abs(a - b) for a, b in pairs))
    for name, total in totals.items():
        print(f"perplexity       {name} {math.exp(-total / count):.5f} on {count} tokens")
    print(f"largest difference of a log-probability: {furthest:.2e}")
    peaks = {name: side.ask(do="score", ids=ids[:8])["peak_mb"] for name, side in sides.items()}
    print(f"peak memory, MB  ours {peaks['ours']:.0f}   transformers {peaks['transformers']:.0f}")
    for side in sides.values():
        side.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], Path(sys.argv[3]))
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else None)
