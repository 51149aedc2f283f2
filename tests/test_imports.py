"""Imports go downwards only, at every depth: no cycles between folders or files.

Imports inside functions count too. Imports for type checkers only do not.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from unspool.features import FEATURES, load

SOURCE = Path(__file__).parent.parent / "src" / "unspool"

# The parts of Unspool from the bottom to the top: a part imports only those before it.
ORDER = [
    "errors", "gc_pause", "features", "notebook", "progress", "native", "text", "model", "sampling",
    "backends", "engine", "store", "session", "decoding", "lens", "lm", "loading", "widget",
    "mcp_server",
    "conversation", "page", "server", "train", "costs", "scale", "__init__", "cli", "__main__",
]  # fmt: skip
# The same within a folder; a folder without a list must only be free of cycles.
ORDER_WITHIN = {"server": ["http", "runtime", "dialects", "tree", "app"]}
# Parts that do not know each other.
INDEPENDENT = [{"text", "model", "sampling"}]
# Features are known through unspool.features only.
FEATURE_PARTS = {"train", "costs", "scale"}
KNOW_NO_FEATURE = {"page", "server"}

Module = tuple[str, ...]  # ("server", "http", "errors")


@cache
def modules() -> dict[Module, Path]:
    files = {}
    for file in SOURCE.rglob("*.py"):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        is_package = parts[-1] == "__init__" and len(parts) > 1
        files[parts[:-1] if is_package else parts] = file
    return files


@cache
def imports() -> dict[Module, set[Module]]:
    """The modules of Unspool that each module imports."""
    return {module: set(imported_by(file)) - {module} for module, file in modules().items()}


def imported_by(file: Path) -> Iterator[Module]:
    for node in runtime_nodes(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: write imports out in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = tuple(name.split("."))
            # The version is a constant, not an import of the public API.
            if parts[0] == "unspool" and parts != ("unspool", "__version__"):
                yield resolve(parts[1:])


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements but those under `if TYPE_CHECKING:`."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for node in getattr(tree, name, ()):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            yield node
            yield from runtime_nodes(node)


def resolve(parts: Module) -> Module:
    """The module of a dotted name, which may end with attributes."""
    while parts and parts not in modules():
        parts = parts[:-1]
    return parts or ("__init__",)


def arrows_within(folder: Module) -> dict[str, set[str]]:
    """Imports between the children of a folder."""
    depth, arrows = len(folder), defaultdict[str, set[str]](set)
    for module, targets in imports().items():
        if module[:depth] != folder or len(module) == depth:
            continue
        arrows[module[depth]] |= {
            target[depth]
            for target in targets
            if target[:depth] == folder and len(target) > depth and target[depth] != module[depth]
        }
    return arrows


def folders() -> list[Module]:
    parents = {module[:depth] for module in modules() for depth in range(len(module))}
    return sorted(parents)


def in_a_cycle(imported: dict[Any, set[Any]]) -> list[str]:
    """Names that remain when everything that imports nothing is removed, again and again."""
    below = {name: targets & imported.keys() for name, targets in imported.items()}
    while leaves := {name for name, targets in below.items() if not targets}:
        below = {name: targets - leaves for name, targets in below.items() if name not in leaves}
    return sorted(map(str, below))


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: "/".join(folder) or "unspool")
def test_no_cycle_between_the_children_of_a_folder(folder: Module) -> None:
    assert in_a_cycle(arrows_within(folder)) == []


def test_no_cycle_between_files() -> None:
    assert in_a_cycle(imports()) == []


def test_every_part_has_a_place_in_the_order() -> None:
    assert {module[0] for module in modules()} <= {*ORDER}
    for folder, order in ORDER_WITHIN.items():
        assert {module[1] for module in modules() if module[0] == folder and module[1:]} <= {*order}


def test_nothing_imports_upward() -> None:
    upward = []
    for module, targets in imports().items():
        for target in targets:
            if ORDER.index(target[0]) > ORDER.index(module[0]):
                upward.append((module, target))
            order = ORDER_WITHIN.get(module[0], [])
            inside = target[0] == module[0] and len(module) > 1 and len(target) > 1
            if order and inside and order.index(target[1]) > order.index(module[1]):
                upward.append((module, target))
    assert not upward


def test_independent_parts_do_not_know_each_other() -> None:
    for group in INDEPENDENT:
        for module, targets in imports().items():
            if module[0] in group:
                assert not {target[0] for target in targets} & (group - {module[0]}), module


def test_server_page_and_commands_know_no_feature() -> None:
    for module, targets in imports().items():
        if module[0] in KNOW_NO_FEATURE:
            assert not {target[0] for target in targets} & FEATURE_PARTS, module
        if module[0] == "cli" and not FEATURE_PARTS & {*module}:  # not the commands of a feature
            assert not [target for target in targets if FEATURE_PARTS & {*target}], module


def test_all_that_features_name_can_be_loaded() -> None:
    targets = {command.target for feature in FEATURES for command in feature.commands}
    targets |= {router for f in FEATURES for group in f.routes for router in group.routers}
    targets |= {finder.find for feature in FEATURES for finder in feature.models}
    assert len(targets) > 6
    for target in sorted(targets):
        assert load(target) is not None


def test_a_server_imports_no_feature() -> None:
    """Imported with every route but those of features."""
    code = f"""
import sys
from unspool.features import load
from unspool.server.app import ROUTE_GROUPS, create_app
for group in ROUTE_GROUPS:
    for router in group.routers:
        load(router)
parts = {{name.split(".")[1] for name in sys.modules if name.startswith("unspool.")}}
print(*sorted(parts & {FEATURE_PARTS}))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []
