"""A tiny random model with a vocabulary, on the native backend, and texts for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unspool
from helpers.word_model import TEXT, save_worded

SENTENCES = [
    f"The {who} of the {what} {does} the pages that nobody else reads, number {number}."
    for number, (who, what, does) in enumerate(
        (who, what, does)
        for who in ("branch", "node", "tree", "page")
        for what in ("text", "scheduler", "batch")
        for does in ("drops", "copies", "keeps")
    )
]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Texts of a few dozen sentences each, in paragraphs."""
    return ["\n\n".join([" ".join(SENTENCES[n:] + SENTENCES[:n]), TEXT.strip()]) for n in range(6)]


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_worded(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def small(small_folder: Path) -> Iterator[Any]:
    with unspool.load(small_folder, memory=64 << 20, threads=1) as lm:
        yield lm


@pytest.fixture(scope="session", autouse=True)
def small_measurements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Train the models of the Markov source for a few steps, let them write little, and read little
    memory."""
    from unspool.costs.parts import exposure, waiting

    folder = tmp_path_factory.mktemp("markov")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exposure, "STEPS", 3)
        patch.setattr(exposure, "cache_folder", lambda: folder)
        patch.setattr(exposure, "TEXTS", (12, 12))
        patch.setattr(exposure, "_DRAWS", 100)
        patch.setattr(waiting, "_BLOCK", 4_000_000)
        yield
