"""Rewrite a template's syntax tree so that every operation is charged to the budget.

A Jinja environment can intercept function calls, filters and operators, but not loops,
comparisons, slices, `~` or string literals. Before compilation these become calls to the hooks in
this file, so that they are charged, and string literals become `Text`. The state of a rendering is
in context variables, because renderings and threads share the compiled template.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.visitor import NodeTransformer

from unspool.text.chat.budget import active_budget
from unspool.text.chat.origin import TEMPLATE, OriginText, concat, origin_mark

GENERATION_EDGE = "\ufdd1"  # a Unicode noncharacter, so no text has it


class RenderState:
    """State of one rendering: its time, and the message whose loop iteration runs."""

    def __init__(
        self, messages: Iterable[Any], now: datetime, mark_generation: bool = False
    ) -> None:
        self.now = now
        self.mark_generation = mark_generation
        self.origin = TEMPLATE  # of literals now
        self._numbers = {id(message): n for n, message in enumerate(messages, start=1)}
        self._loop = 0  # id of the loop over the messages

    def enter(self, loop: int, targets: Iterable[Any]) -> None:
        for number in filter(None, (self._numbers.get(id(target)) for target in targets)):
            self._loop, self.origin = loop, origin_mark(number, template=True)

    def leave(self, loop: int) -> None:
        if loop == self._loop:
            self._loop, self.origin = 0, TEMPLATE


current_run: ContextVar[RenderState] = ContextVar("unspool_template_run")


# Hooks that the rewritten template calls. -----------------------------------------------------


def enter_loop(loop: int, *targets: Any) -> None:
    """Run at each loop iteration: literals from here on belong to this message."""
    active_budget().spend()
    current_run.get().enter(loop, targets)


def leave_loop(loop: int) -> None:
    current_run.get().leave(loop)


def enter_body() -> bool:
    """Run at each call of a macro or block, and for each item of a filtered loop."""
    active_budget().spend()
    return True


def literal(text: str) -> OriginText:
    """Return a string literal of the template."""
    active_budget().charge_text(len(text))
    return OriginText(text, current_run.get().origin)


def generation_edge() -> OriginText:
    """Return the mark at the edges of a generation block, if marks were requested."""
    return OriginText(GENERATION_EDGE if current_run.get().mark_generation else "", TEMPLATE)


def weighed(value: Any) -> Any:
    active_budget().measure(value)
    return value


def join_texts(*values: Any) -> OriginText:
    """Jinja's `~`."""
    return concat(map(show, values))


def show(value: Any) -> str:
    """Return a value as text; each `{{ ... }}` is output through this function."""
    active_budget().measure(value)
    if value is None or isinstance(value, bool | int | float):
        return OriginText(str(value), current_run.get().origin)
    return str(value)


HOOKS = {hook.__name__: hook for hook in
         (enter_loop, leave_loop, enter_body, literal, generation_edge, weighed,
          join_texts)}  # fmt: skip


class Rewriter(NodeTransformer):
    def visit_For(self, node: nodes.For) -> list[nodes.Node]:  # noqa: N802
        self.generic_visit(node)
        target = node.target
        names = [target] if isinstance(target, nodes.Name) else target.find_all(nodes.Name)
        number = nodes.Const(id(node))
        bound = [nodes.Name(name.name, "load") for name in names]
        node.body.insert(0, nodes.ExprStmt(hook_call("enter_loop", [number, *bound])))
        if node.test is not None:
            node.test = nodes.And(hook_call("enter_body", []), node.test)
        return [node, nodes.ExprStmt(hook_call("leave_loop", [number]))]

    def _visit_body(self, node: Any) -> Any:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(hook_call("enter_body", []), lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _visit_body  # noqa: N815

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Call:  # noqa: N802
        return hook_call("literal", [nodes.Const(node.data)])

    def visit_Const(self, node: nodes.Const) -> nodes.Expr:  # noqa: N802
        return hook_call("literal", [node]) if isinstance(node.value, str) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return hook_call("join_texts", node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        node.expr = hook_call("weighed", [node.expr])
        for operand in node.ops:
            operand.expr = hook_call("weighed", [operand.expr])
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:  # noqa: N802
        node.node = self.visit(node.node)
        if isinstance(node.arg, nodes.Slice):
            node.node = hook_call("weighed", [node.node])
        if not isinstance(node.arg, nodes.Const):  # a key is looked up, never written
            node.arg = self.visit(node.arg)
        return node

    def _visit_file(self, node: nodes.Stmt) -> None:
        raise TemplateSyntaxError("a chat template cannot read other files", node.lineno)

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _visit_file  # noqa: N815


def hook_call(name: str, args: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)
