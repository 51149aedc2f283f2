"""The code speaks plain words: names are those of the field, docstrings say what a thing does."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("src/unspool", "bench", "tests")

# Names that say nothing about the value: participles, pronouns, and verbs without an object.
BARE_WORDS = {
    *(
        "found",
        "told",
        "given",
        "kept",
        "asked",
        "seen",
        "begun",
        "wanted",
        "said",
        "shown",
        "made",
    ),
    *(
        "left",
        "taken",
        "held",
        "brought",
        "gone",
        "known",
        "heard",
        "meant",
        "sent",
        "got",
        "drawn",
    ),
    *("chosen", "thought", "own", "ours", "theirs", "each", "one", "whole", "rest", "more", "much"),
    *("such", "same", "both", "of", "take", "put", "like"),
}

# Phrases of a private dialect. A reader whose second language is English stumbles over each.
PHRASES = re.compile(
    r"""\b(?:
        behind\ it|behind\ them|so\ many|so\ much|nobody|somebody|whoever|whatever|whichever
        |taken\ back|takes?\ back|stands?\ at|stands?\ behind|stands?\ in
        |lies\ in|lies\ at|where\ they\ lie
        |is\ told|are\ told|was\ told|tells?\ apart|told\ apart
        |wants?|wanted|begun|of\ its\ own|of\ one's\ own|as\ well\ as\ it\ can|by\ and\ by|at\ once
        |goes\ on|go\ on|gives?\ up|lets?\ go|let\ go\ of|comes?\ free|holds?\ good
    )\b""",
    re.VERBOSE | re.IGNORECASE,
)

# Names that stay although they are on the list, and why.
ALLOWED_NAMES = {
    "given": "field of traces and of diffusion requests, in JSON",
    "chosen": "DPO's own term, and a field of steps in JSON",
    "thought": "field of steps in JSON",
    "rest": "field of attributions in JSON",
    "said": "field of attributions in JSON",
    "kept": "field of stage reports in JSON",
    "like": "option `--like` of the trainer, stored in run folders",
}
ALLOWED_TEXTS = {"want": "JSON field of /v1/runs"}

# Classes that are the same idea in two places.
SAME_IDEA = {
    "PackedMatrix": "packed weights, on the CPU and on a GPU",
    "RecurrentObserver": "observed recurrent layers, in the native and in the torch backend",
    "Candidate": "a candidate token, with and without its text",
}

# Parts of the source that have not been rewritten yet.
NOT_YET = ("page",)


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def bindings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each definition, parameter, variable and attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.lineno, node.name
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield node.body[0].lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the text of raised errors and of `help=`."""
    for node in ast.walk(tree):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Raise) and node.exc is not None:
            parts = [node.exc]
        elif isinstance(node, ast.keyword) and node.arg in ("help", "description", "summary"):
            parts = [node.value]
        for part in parts:
            for inner in ast.walk(part):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    yield inner.lineno, inner.value


def violations(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (kind, line, text) for each name or text that breaks the rules."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    for line, name in bindings(tree):
        if name.strip("_") in BARE_WORDS and name not in ALLOWED_NAMES:
            yield "name", line, name
    for kind, texts in (
        ("docstring", docstrings(tree)),
        ("comment", comments(source)),
        ("message", messages(tree)),
    ):
        for line, text in texts:
            for match in PHRASES.finditer(text):
                if match.group().lower() not in ALLOWED_TEXTS:
                    yield kind, line, match.group()


def test_names_and_texts_are_plain():
    problems = [
        f"{path.relative_to(ROOT)}:{line}: {kind} {text!r}"
        for path in python_files("src/unspool")
        if path.relative_to(ROOT / "src" / "unspool").parts[0] not in NOT_YET
        for kind, line, text in violations(path)
    ]
    assert not problems


def test_class_names_are_unique():
    """One name, one idea: a reader who searches for a class finds one definition."""
    places: dict[str, list[str]] = {}
    for path in python_files("src/unspool"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    repeated = {name: files for name, files in places.items() if len(files) > 1}
    assert repeated.keys() == SAME_IDEA.keys(), repeated


def report(folders: list[str], details: bool) -> None:
    totals: Counter[str] = Counter()
    for folder in folders:
        paths = python_files(folder) if (ROOT / folder).is_dir() else [ROOT / folder]
        for path in paths:
            for kind, line, text in violations(path):
                totals[kind] += 1
                if details:
                    print(f"{path.relative_to(ROOT)}:{line}: {kind}: {text}")
    print(*(f"{kind}: {number}" for kind, number in sorted(totals.items())), sep="  ")


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "-v"]
    report(arguments or list(FOLDERS), "-v" in sys.argv)
