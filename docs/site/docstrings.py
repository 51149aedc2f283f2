"""Docstrings, comments and signatures of the package as Markdown.

Attributes of classes are documented by a trailing comment (`kept: int  # tokens left`), by the
comment lines above them, or by an `Attributes:` section of the class.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

_SECTIONS = {
    "Args": "Parameters",
    "Attributes": "Attributes",
    "Returns": "Returns",
    "Yields": "Yields",
    "Raises": "Raises",
    "Example": "Example",
    "Examples": "Examples",
}
_ALIGNED = re.compile(r"^([a-z_*][\w, .*]*?|[a-z_]+, \.\.\.)(?: {2,})(\S.*)$")
_GOOGLE = re.compile(r"^ {4}(\*{0,2}\w+)(?: \([^)]*\))?: (.*)$")
_SHORTEST_WRAPPED = 88  # characters of a signature that is still written on one line


def markdown(doc: str | None) -> str:
    """Convert a docstring: sections and aligned lists become lists, indented blocks code."""
    lines = inspect.cleandoc(doc or "").splitlines()
    output: list[str] = []
    section = ""
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if (title := line.rstrip(":")) in _SECTIONS and line.endswith(":"):
            section = title
            output += ["", f"**{_SECTIONS[title]}**", ""]
            continue
        if section and line and not line.startswith(" "):
            section = ""
        if section.startswith("Example") or (not section and line.startswith("    ")):
            block = [line]
            while number < len(lines) and (not lines[number] or lines[number].startswith("    ")):
                block.append(lines[number])
                number += 1
            code = textwrap.dedent("\n".join(block)).strip("\n")
            if code:
                output += ["", "```python", code, "```", ""]
            continue
        entry = _GOOGLE.match(line) if section else _ALIGNED.match(line)
        if entry is None:
            output.append(line.strip() if section else line)
            continue
        indent = len(line) - len(line.lstrip())
        text = [entry[2]]
        while number < len(lines) and lines[number].startswith(" " * (indent + 1)):
            text.append(lines[number].strip())
            number += 1
        names = ", ".join(
            name if name == "..." else f"`{name}`" for name in re.split(r",\s*", entry[1])
        )
        if output and output[-1] and not output[-1].startswith("- "):
            output.append("")
        output.append(f"- {names}: {escape(' '.join(text))}")
    return "\n".join(output).strip()


def escape(text: str) -> str:
    """Escape what Markdown would read as a tag or a table border, outside of `code`."""
    parts = re.split(r"(`+[^`]*`+)", text)
    parts[::2] = [re.sub(r"([<|*_\[\]])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


def code(text: str) -> str:
    """Return text as inline code; Python-Markdown's tables know that a `|` in it is no border."""
    return f"`{text}`" if text else ""


def summary(doc: str | None) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join(inspect.cleandoc(doc or "").split("\n\n")[0].split())


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table; columns without content are left out."""
    columns = [n for n in range(len(head)) if n == 0 or any(row[n] for row in rows)]
    lines = [[head[n] for n in columns], ["---"] * len(columns)]
    lines += [[" ".join(row[n].split()) for n in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True)
class Attribute:
    """A documented attribute of a class: a field, an instance attribute or a property."""

    name: str
    type: str
    description: str
    default: str = ""


@cache
def _module_source(name: str) -> tuple[ast.Module, tuple[str, ...]]:
    text = inspect.getsource(sys.modules[name])
    return ast.parse(text), tuple(text.splitlines())


def class_node(kind: type) -> tuple[ast.ClassDef, tuple[str, ...]]:
    """Return the syntax tree of a class, and the lines of its module."""
    tree, lines = _module_source(kind.__module__)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
            return node, lines
    raise LookupError(f"no source of {kind.__qualname__}")


def own_bases(kind: type) -> list[type]:
    """Return the class and its bases that belong to the package, in order of inheritance."""
    return [base for base in kind.__mro__ if base.__module__.split(".")[0] == "unspool"]


def attributes(kind: type) -> list[Attribute]:
    """Return all public attributes, those of base classes included."""
    by_name: dict[str, Attribute] = {}
    for base in own_bases(kind):
        for attribute in _own_attributes(base):
            by_name.setdefault(attribute.name, attribute)
    return list(by_name.values())


def _own_attributes(kind: type) -> Iterator[Attribute]:
    node, lines = class_node(kind)
    listed = _listed_attributes(kind.__doc__)
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            name = item.target.id
            if not name.startswith("_"):
                text = listed.get(name) or comment_of(item, lines)
                default = "" if item.value is None else ast.unparse(item.value)
                yield Attribute(name, ast.unparse(item.annotation), text, _readable(default))
        elif isinstance(item, ast.FunctionDef):
            if item.name == "__init__":
                yield from _instance_attributes(item, lines, listed)
            elif _is_property(item) and not item.name.startswith("_"):
                type_name = ast.unparse(item.returns) if item.returns else ""
                doc = " ".join((ast.get_docstring(item) or "").split())
                yield Attribute(item.name, type_name, doc)


def _instance_attributes(
    function: ast.FunctionDef, lines: tuple[str, ...], listed: dict[str, str]
) -> Iterator[Attribute]:
    arguments = {a.arg: a.annotation for a in (*function.args.args, *function.args.kwonlyargs)}
    for item in ast.walk(function):
        if not isinstance(item, ast.Assign | ast.AnnAssign):
            continue
        targets = item.targets if isinstance(item, ast.Assign) else [item.target]
        for target in targets:
            parts = list(target.elts) if isinstance(target, ast.Tuple) else [target]
            for part in parts:
                if not isinstance(part, ast.Attribute) or part.attr.startswith("_"):
                    continue
                if not isinstance(part.value, ast.Name) or part.value.id != "self":
                    continue
                annotation = item.annotation if isinstance(item, ast.AnnAssign) else None
                annotation = annotation or arguments.get(part.attr)
                text = listed.get(part.attr) or comment_of(item, lines)
                yield Attribute(part.attr, ast.unparse(annotation) if annotation else "", text)


def _listed_attributes(doc: str | None) -> dict[str, str]:
    """Read the `Attributes:` section of a docstring."""
    text = inspect.cleandoc(doc or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", text, re.MULTILINE)
    return {name: " ".join(description.split()) for name, description in entries}


def comment_of(item: ast.stmt, lines: tuple[str, ...]) -> str:
    """Return the comment at the end of a statement, or the lines of comment above it."""
    last = item.end_lineno or item.lineno
    match = re.search(r"  # (?!type: |fmt: |noqa)(.*?)(?:  # .*)?$", lines[last - 1])
    if match:
        return match[1].strip()
    above: list[str] = []
    number = item.lineno - 2
    while number >= 0 and lines[number].strip().startswith("# "):
        above.insert(0, lines[number].strip()[2:])
        number -= 1
    text = " ".join(above)
    return "" if text.startswith("--") else text


def _is_property(item: ast.FunctionDef) -> bool:
    names = {ast.unparse(decorator) for decorator in item.decorator_list}
    return bool(names & {"property", "cached_property", "functools.cached_property"})


def _readable(default: str) -> str:
    """Return a default value without the machinery of dataclasses."""
    if default.startswith("field("):
        if match := re.search(r"default=([^,)]+)", default):
            return match[1]
        return {"list": "[]", "dict": "{}"}.get(default[22:26], "")
    return default


@dataclass(frozen=True)
class Method:
    """A public method: its name, how it is called, and its docstring."""

    name: str
    signature: str
    returns: str
    doc: str


def methods(kind: type) -> list[Method]:
    """Return all public methods in the order of the source, those of the class itself first."""
    by_name: dict[str, Method] = {}
    for base in own_bases(kind):
        node, _ = class_node(base)
        for item in node.body:
            if not isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            decorators = {ast.unparse(decorator) for decorator in item.decorator_list}
            is_hidden = item.name.startswith("_") or "overload" in decorators
            is_setter = any(name.endswith(".setter") for name in decorators)
            if is_hidden or is_setter or item.name in by_name:
                continue
            if isinstance(item, ast.FunctionDef) and _is_property(item):
                continue
            by_name[item.name] = _method(item, kind.__name__ if "classmethod" in decorators else "")
    return list(by_name.values())


def function(value: Any) -> Method:
    """Return a function of a module."""
    tree, _ = _module_source(value.__module__)
    for item in tree.body:
        if isinstance(item, ast.FunctionDef) and item.name == value.__name__:
            return _method(item)
    raise LookupError(f"no source of {value.__name__}")


def _method(item: ast.FunctionDef | ast.AsyncFunctionDef, owner: str = "") -> Method:
    words = "async " if isinstance(item, ast.AsyncFunctionDef) else ""
    arguments = ast.unparse(item.args)
    arguments = re.sub(r"^(self|cls)(, |$)", "", arguments)
    arguments = arguments.replace("**options: Unpack[Options]", "**options")
    arguments = re.sub(r"\*\*options: Unpack\[(\w+)\]", "**options", arguments)
    parts = [_spaced(part) for part in _split_arguments(arguments)]
    arguments = ", ".join(parts)
    returns = ast.unparse(item.returns).strip("'\"") if item.returns else ""
    name = f"{owner}.{item.name}" if owner else item.name
    signature = f"{words}{name}({arguments})" + (f" -> {returns}" if returns else "")
    if len(signature) > _SHORTEST_WRAPPED:
        inner = ",\n    ".join(parts)
        signature = f"{words}{name}(\n    {inner},\n)" + (f" -> {returns}" if returns else "")
    return Method(item.name, signature, returns, ast.get_docstring(item) or "")


def _spaced(argument: str) -> str:
    """Write `name: type = default` with spaces around the sign, as people do."""
    name, colon, rest = argument.partition(": ")
    return f"{name}: {rest.replace('=', ' = ', 1)}" if colon else argument


def _split_arguments(text: str) -> list[str]:
    """Split at the commas that are in no bracket or string."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]
