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
    "found", "told", "given", "kept", "asked", "seen", "begun", "wanted", "said", "shown", "made",
    "left", "taken", "held", "brought", "gone", "known", "heard", "meant", "sent", "got", "drawn",
    "chosen", "thought", "own", "ours", "theirs", "each", "one", "whole", "rest", "more", "much",
    "such", "same", "both", "of", "take", "put", "like",
}  # fmt: skip
BARE_NAME = re.compile(rf"\b_*(?:{'|'.join(sorted(BARE_WORDS))})_*\b")
COMMENT_OR_TEXT = re.compile(
    r"#[^\n]*|\"{3}.*?\"{3}|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL
)

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


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def source_files(folder: str) -> list[Path]:
    """Python files, and JavaScript files that were written here."""
    scripts = [p for p in (ROOT / folder).rglob("*.js") if "vendor" not in p.parts]
    return python_files(folder) + sorted(scripts)


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


# A comment, a string, or a regular expression (after a sign that an expression can follow).
JS_LITERAL = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<regex>(?<=[=(,:;!&|?\[{}>])\s*/(?![*/])(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n])+/[a-z]*)""",
    re.VERBOSE | re.DOTALL,
)
JS_NAME = r"[A-Za-z_$][\w$]*"
JS_DECLARATION = re.compile(
    rf"\b(?:const|let|var)\s+(?=[\w$\[{{])|\bfunction\b\s*\*?\s*({JS_NAME})?\s*(?=\()"
)
JS_PATTERN_NAME = re.compile(rf"(?:^|[,{{\[(:]|\.\.\.)\s*({JS_NAME})\s*(?=[,}}\])=]|$)")


def split_javascript(source: str) -> tuple[str, list[tuple[str, int, str]]]:
    """Return the code without literals, and (kind, line, text) of each comment and text in it."""
    code: list[str] = []
    literals: list[tuple[str, int, str]] = []
    braces: list[int] = []  # of each `${` that is open: how many braces are open inside it
    in_template = False
    pos = text_start = 0
    while pos < len(source):
        char = source[pos]
        if in_template:
            if char == "\\":
                pos += 2
                continue
            if char != "`" and not source.startswith("${", pos):
                pos += 1
                continue
            literals.append(("text", source.count("\n", 0, text_start) + 1, source[text_start:pos]))
            code.append("\n" * source.count("\n", text_start, pos))
            in_template = False
            if char == "`":
                code.append("``")
                pos += 1
            else:
                code.append(";")
                braces.append(0)
                pos += 2
        elif match := JS_LITERAL.match(source, pos):
            if match.lastgroup != "regex":
                line = source.count("\n", 0, pos) + 1
                literals.append((str(match.lastgroup), line, match.group()))
            code.append('""' + "\n" * match.group().count("\n"))
            pos = match.end()
        elif char == "`" or (char == "}" and braces and braces[-1] == 0):
            if char == "}":
                braces.pop()
                code.append(";")
            in_template = True
            pos = text_start = pos + 1
        else:
            if braces:
                braces[-1] += {"{": 1, "}": -1}.get(char, 0)
            code.append(char)
            pos += 1
    return "".join(code), literals


def javascript_bindings(code: str) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each variable, function and parameter."""

    def balanced(start: int, step: int) -> int:
        """Return the position of the bracket that matches the one at `start`."""
        depth, pos = 0, start
        while 0 <= pos < len(code):
            depth += (code[pos] in "([{") - (code[pos] in ")]}")
            if depth == 0:
                return pos
            pos += step
        return start

    def names(start: int, end: int) -> Iterator[tuple[int, str]]:
        for match in JS_PATTERN_NAME.finditer(code[start:end]):
            yield code.count("\n", 0, start + match.start(1)) + 1, match.group(1)

    for match in JS_DECLARATION.finditer(code):
        if match.group(1):
            yield code.count("\n", 0, match.start()) + 1, match.group(1)
        start = match.end()
        if code[start] in "([{":
            yield from names(start, balanced(start, 1) + 1)
        elif name := re.match(JS_NAME, code[start:]):
            yield code.count("\n", 0, start) + 1, name.group()
    for match in re.finditer(r"\s*=>", code):
        end = match.start()
        if code[end - 1] == ")":
            yield from names(balanced(end - 1, -1), end)
        elif name := re.search(rf"{JS_NAME}$", code[max(0, end - 60) : end]):
            yield code.count("\n", 0, end) + 1, name.group()


def javascript_violations(source: str) -> Iterator[tuple[str, int, str]]:
    code, literals = split_javascript(source)
    for line, name in javascript_bindings(code):
        if name.strip("_") in BARE_WORDS and name not in ALLOWED_NAMES:
            yield "name", line, name
    for kind, line, text in literals:
        for match in PHRASES.finditer(text):
            if match.group().lower() not in ALLOWED_TEXTS:
                yield kind, line + text.count("\n", 0, match.start()), match.group()


def violations(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (kind, line, text) for each name or text that breaks the rules."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".js":
        yield from javascript_violations(source)
        return
    names = set(BARE_NAME.findall(COMMENT_OR_TEXT.sub("", source))) - ALLOWED_NAMES.keys()
    has_phrases = PHRASES.search(source)
    if not names and not has_phrases:  # parsing takes most of the time
        return
    tree = ast.parse(source)
    for line, name in bindings(tree) if names else ():
        if name.strip("_") in BARE_WORDS and name not in ALLOWED_NAMES:
            yield "name", line, name
    if not has_phrases:
        return
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
        for folder in FOLDERS
        for path in source_files(folder)
        for kind, line, text in violations(path)
    ]
    assert not problems


def test_class_names_are_unique():
    """One name, one idea: a reader who searches for a class finds one definition."""
    places: dict[str, list[str]] = {}
    for path in python_files("src/unspool"):
        for name in re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    repeated = {name: files for name, files in places.items() if len(files) > 1}
    assert repeated.keys() == SAME_IDEA.keys(), repeated


def report(folders: list[str], details: bool) -> None:
    totals: Counter[str] = Counter()
    for folder in folders:
        paths = source_files(folder) if (ROOT / folder).is_dir() else [ROOT / folder]
        for path in paths:
            for kind, line, text in violations(path):
                totals[kind] += 1
                if details:
                    print(f"{path.relative_to(ROOT)}:{line}: {kind}: {text}")
    print(*(f"{kind}: {number}" for kind, number in sorted(totals.items())), sep="  ")


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "-v"]
    report(arguments or list(FOLDERS), "-v" in sys.argv)
