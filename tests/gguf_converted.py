"""Models as GGUF files, made by llama.cpp's own converter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import assets


def convert(pairs: Iterable[tuple[Path, Path]], *, vocabulary: bool = False) -> None:
    """Folders as transformers saves them to files, in one process; with a vocabulary that says
    nothing, llama.cpp opens them."""
    script = Path(__file__).with_name("convert_to_gguf.py")
    names = [str(path) for pair in pairs for path in pair]
    subprocess.run(
        [
            sys.executable, str(script), str(assets.llama_cpp_source()),
            "vocabulary" if vocabulary else "plain", *names,
        ],
        check=True, capture_output=True,
    )  # fmt: skip


def convert_each(
    names: Iterable[str],
    save: Callable[[str, Path], Any],
    folder: Path,
    *,
    vocabulary: bool = False,
) -> Path:
    """NAME.gguf of each tiny model, in the folder where it is saved."""
    pairs = [(folder / name, folder / f"{name}.gguf") for name in names]
    for saved, _ in pairs:
        save(saved.name, saved)
    convert(pairs, vocabulary=vocabulary)
    return folder
