"""Rewrite a template's syntax tree so that all it does is paid for, and marks are looked through.

Jinja lets an environment step in when a template calls a function, but not when it loops, compares,
slices or joins with `~`. So these are turned into calls to the functions here. What belongs to one
rendering (its budget, its marks) travels in a context variable, because the compiled template is
shared between renderings and threads.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.visitor import NodeTransformer

from unspool.text.chat.budget import Budget
from unspool.text.chat.marks import Marks


class Run:
    """What belongs to one rendering: its budget, its marks, its clock, its messages."""

    def __init__(self, variables: Mapping[str, Any], marks: Marks | None, now: datetime,
                 message_marks: Mapping[int, str]) -> None:  # fmt: skip
        self.budget = Budget(variables)
        self.marks = marks
        self.mark = marks.mark if marks else "\0"
        self.now = now
        self.message_marks = message_marks  # id() of a message -> what to write where it begins

    def marked(self, value: Any) -> bool:
        return self.marks is not None and isinstance(value, str) and self.mark in value

    def bare(self, value: Any) -> Any:
        """The value without marks, for questions whose answer is not text."""
        if self.marks is None:
            return value
        if isinstance(value, str):
            return self.marks.plain(value)
        if isinstance(value, list | tuple):
            return type(value)(map(self.bare, value)) if type(value) in (list, tuple) else value
        if isinstance(value, dict):
            return {self.bare(key): self.bare(item) for key, item in value.items()}
        return value


current_run: ContextVar[Run] = ContextVar("unspool_template_run")


# What the rewritten template calls. ----------------------------------------------------------


def enter_loop(literal: int, *targets: Any) -> str:
    """Paid at each turn of a loop; writes where a message begins, when that is asked for."""
    run = current_run.get()
    run.budget.spend(1 + literal // 64)
    if run.message_marks:
        return "".join(run.message_marks.get(id(target), "") for target in targets)
    return ""


def enter_body(literal: int) -> bool:
    """Paid at each call of a macro or block, and for each item that a filtered loop looks at."""
    current_run.get().budget.spend(1 + literal // 64)
    return True


def join_texts(*values: Any) -> str:
    """Jinja's `~`."""
    budget = current_run.get().budget
    for value in values:
        budget.weigh(value)
    texts = [str(value) for value in values]
    budget.text(sum(map(len, texts)))
    return "".join(texts)


def take_slice(value: Any, start: Any, stop: Any, step: Any) -> Any:
    run = current_run.get()
    run.budget.spend_shallow(value)
    where = slice(start, stop, step)
    if run.marks is not None and run.marked(value):
        return run.marks.slice(value, where)
    return value[where]


def compare(left: Any, *steps: Any) -> Any:
    """`a < b <= c`: operands with the operators' names between them."""
    run, answer = current_run.get(), True
    for name, right in zip(steps[::2], steps[1::2], strict=True):
        answer = _compare_two(run, name, left, right)
        if not answer:
            return answer
        left = right
    return answer


def _compare_two(run: Run, name: str, left: Any, right: Any) -> Any:
    if name in ("in", "notin"):
        run.budget.spend_shallow(right)
        if not isinstance(left, str):
            run.budget.weigh(right)
            run.budget.weigh(left)
        found = left in right or (run.marks is not None and run.bare(left) in run.bare(right))
        return found if name == "in" else not found
    if isinstance(left, str | list | tuple | dict) and isinstance(right, type(left)):
        run.budget.weigh(left)
        run.budget.weigh(right)
        left, right = run.bare(left), run.bare(right)
    return _COMPARE[name](left, right)


_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt,
    "lteq": operator.le, "gt": operator.gt, "gteq": operator.ge,
}  # fmt: skip
CALLED_BY_TEMPLATE = frozenset({enter_loop, enter_body, join_texts, take_slice, compare})


# The rewriting. ------------------------------------------------------------------------------


class Rewriter(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        names = [nodes.Name(name.name, "load") for name in _names(node.target)]
        enter = _call("enter_loop", [nodes.Const(_literal(node.body)), *names])
        node.body.insert(0, nodes.Output([enter], lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_call("enter_body", [nodes.Const(0)]), node.test)
        return node

    def _visit_body(self, node: Any) -> Any:
        self.generic_visit(node)
        enter = _call("enter_body", [nodes.Const(_literal(node.body))])
        node.body.insert(0, nodes.ExprStmt(enter, lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _visit_body  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _call("join_texts", node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        operands: list[nodes.Expr] = [node.expr]
        for step in node.ops:
            operands += [nodes.Const(step.op), step.expr]
        return _call("compare", operands)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return _call("take_slice", [node.node, *(end or nodes.Const(None) for end in ends)])

    def _visit_file(self, node: nodes.Stmt) -> None:
        raise TemplateSyntaxError("a chat template cannot read other files", node.lineno)

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _visit_file  # noqa: N815


def _call(name: str, args: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)


def _names(target: nodes.Node) -> list[nodes.Name]:
    return [target] if isinstance(target, nodes.Name) else list(target.find_all(nodes.Name))


def _literal(body: list[nodes.Node]) -> int:
    return sum(len(data.data) for part in body for data in part.find_all(nodes.TemplateData))
