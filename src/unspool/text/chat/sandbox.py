"""Render an untrusted chat template in a sandbox, in the Jinja dialect of transformers.

A chat template is a program that came with a download. Jinja's sandbox keeps it away from files and
Python internals, but does not stop a template that never ends or fills the memory. So every
operation is charged to one budget: calls, filters, tests and operators here, all others by the
rewritten syntax tree. All strings are `Text`, which records what the template wrote itself and what
came from the caller.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, ItemsView, Iterable, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn, SupportsIndex

from jinja2 import nodes, pass_context, pass_eval_context
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import sync_do_join
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, safe_range
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import escape

from unspool.errors import ModelFileError, UnspoolError

# -- Limits on a chat template: operations, characters processed, size of the largest value

_STEPS = 1_000_000
_MAX_SIZE = 4_000_000  # characters and items of one value, in addition to the input's
_MAX_INTEGER_BITS = 4_096
_TIMEOUT_S = 10.0
_CLOCK_INTERVAL = 10_000  # steps between two reads of the clock


class TemplateLimitError(Exception):
    """The template exceeded a limit; the message continues "the chat template ..."."""


class TemplateBudget:
    def __init__(self, variables: Any = None) -> None:
        self._remaining = self._max_size = 1 << 60  # measure the input without limit
        self._deadline = float("inf")
        self._next_clock = 0
        self._sizes: dict[int, tuple[Any, int]] = {}  # by id: value (kept alive) and size
        size = self.measure(variables)
        self._remaining = _STEPS + 16 * size
        self._max_size = _MAX_SIZE + 8 * size
        self._next_clock = self._remaining - _CLOCK_INTERVAL
        self._deadline = time.monotonic() + _TIMEOUT_S

    def refuse(self, reason: str) -> NoReturn:
        raise TemplateLimitError(reason)

    def spend(self, steps: int = 1) -> None:
        self._remaining -= steps
        if self._remaining < 0:
            self.refuse("does not end")
        if self._remaining < self._next_clock:
            self._next_clock = self._remaining - _CLOCK_INTERVAL
            if time.monotonic() > self._deadline:
                self.refuse(f"takes more than {_TIMEOUT_S:.0f} seconds")

    def check(self, size: int) -> None:
        """Raise if a value is too large."""
        if size > self._max_size:
            size_text = f"{size:,}" if size.bit_length() < 200 else "too many"
            self.refuse(f"builds a value of {size_text} characters and items")

    def charge_text(self, length: int) -> None:
        """Charge for a text of this length, before it is built where possible."""
        self.check(length)
        self.spend(1 + length // 512)

    def charge_widths(self, layout: str) -> None:
        """Charge for the field widths in a format such as `%20s`."""
        self.charge_text(sum(int(digits[:12]) for digits in re.findall(r"\d+", layout)))

    def measure(self, value: Any) -> int:
        """Charge for an operation on a value; return its size, nested values included."""
        self.spend()
        size = self._size(value)
        self.check(size)
        return size

    def _size(self, value: Any) -> int:
        if isinstance(value, str):
            self.spend(len(value) // 512)
            return 1 + len(value)
        if not isinstance(value, _CONTAINERS):
            return 1
        self.spend(1 + len(value) // 16)
        if isinstance(value, range):
            return 1 + len(value)
        # A template cannot modify lists and mappings, so each is measured only once.
        measured = self._sizes.get(id(value))
        if measured is None:
            self.spend(len(value) // 4)
            items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            measured = value, 1 + sum(map(self._size, items))
            self._sizes[id(value)] = measured
        return measured[1]

    def check_product(self, sign: str, left_value: Any, right_value: Any) -> None:
        """Check `left * right` or `left ** right` before it is computed."""
        if isinstance(left_value, int) and isinstance(right_value, int):
            bits = left_value.bit_length()
            bits = bits * right_value if sign == "**" else bits + right_value.bit_length()
            if bits > _MAX_INTEGER_BITS:
                self.refuse("computes an excessively large number")
        elif sign == "*":
            repeats, series = (
                (left_value, right_value)
                if isinstance(left_value, int)
                else (right_value, left_value)
            )
            if isinstance(repeats, int) and isinstance(series, str | list | tuple):
                self.charge_text(len(series) * repeats)


_CONTAINERS = (list, tuple, dict, set, range, KeysView, ValuesView, ItemsView)
current_budget: ContextVar[TemplateBudget | None] = ContextVar(
    "unspool_template_budget", default=None
)


def active_budget() -> TemplateBudget:
    """Return the budget of the current rendering, or a new one."""
    return current_budget.get() or TemplateBudget()


# -- Strings that record the origin of each character

_MAX_DEPTH = 100


def origin_mark(owner: int, *, template: bool) -> str:
    """Return the origin of one character. Owner n is message n, counted from 1; 0 means none."""
    return chr(2 * owner + template)


UNKNOWN = origin_mark(0, template=False)
TEMPLATE = origin_mark(0, template=True)


def is_template(origin: str) -> bool:
    """Return whether the template wrote all of these characters."""
    return all(ord(mark) & 1 for mark in set(origin))


class OriginText(str):
    """A string with an origin mark for each character."""

    __slots__ = ("_origin",)
    _origin: str

    def __new__(cls, text: str, origin: str = UNKNOWN) -> OriginText:
        """`origin` is one mark per character, or a single one for all."""
        self = super().__new__(cls, text)
        self._origin = origin * len(text) if len(origin) == 1 else origin
        return self

    def __str__(self) -> OriginText:
        return self

    def __add__(self, other: str) -> OriginText:
        return concat((self, other))

    def __radd__(self, other: str) -> OriginText:
        return concat((other, self))

    def __mul__(self, count: SupportsIndex) -> OriginText:
        return OriginText(super().__mul__(count), self._origin * count)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> OriginText:
        return _format_percent(self, values)

    def __getitem__(self, index: SupportsIndex | slice) -> OriginText:
        return OriginText(super().__getitem__(index), self._origin[index])

    def lstrip(self, chars: str | None = None, /) -> OriginText:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> OriginText:
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None, /) -> OriginText:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> OriginText:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> OriginText:
        return self[: -len(suffix)] if suffix and self.endswith(suffix) else self

    def _located(self, parts: Collection[str], gap: int | None) -> list[OriginText]:
        """Return `parts` as `Text`; they are in order, `gap` characters apart (None: blanks)."""
        active_budget().check(16 * len(parts))  # each is a new object
        located, at = [], 0
        for part in parts:
            at = at if gap is not None else self.index(part, at)
            located.append(self[at : at + len(part)])
            at += len(part) + (gap or 0)
        return located

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[OriginText]:  # type: ignore[override]
        return self._located(super().split(sep, maxsplit), len(sep) if sep else None)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[OriginText]:  # type: ignore[override]
        return self._located(super().rsplit(sep, maxsplit), len(sep) if sep else None)

    def splitlines(self, keepends: bool = False) -> list[OriginText]:  # type: ignore[override]
        lines = self._located(super().splitlines(keepends=True), 0)
        ends = super().splitlines(keepends)
        return [line[: len(end)] for line, end in zip(lines, ends, strict=True)]

    def partition(self, sep: str, /) -> tuple[OriginText, OriginText, OriginText]:
        before, separator, after = self._located(super().partition(sep), 0)
        return before, separator, after

    def rpartition(self, sep: str, /) -> tuple[OriginText, OriginText, OriginText]:
        before, separator, after = self._located(super().rpartition(sep), 0)
        return before, separator, after

    def join(self, items: Iterable[str], /) -> OriginText:
        pieces: list[str] = []
        for item in items:
            pieces += (self, item)
        return concat(pieces[1:])

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> OriginText:
        if old:
            return OriginText(new, origin_of(new)).join(self.split(old, count))
        concat([new] * (len(self) + 1))  # charge for the result
        return OriginText(super().replace(old, new, count))

    def _same_length(self, changed: str) -> OriginText:
        return OriginText(changed, self._origin if len(changed) == len(self) else UNKNOWN)

    def lower(self) -> OriginText:
        return self._same_length(super().lower())

    def upper(self) -> OriginText:
        return self._same_length(super().upper())

    def capitalize(self) -> OriginText:
        return self._same_length(super().capitalize())

    def title(self) -> OriginText:
        return self._same_length(super().title())


class SafeOriginText(OriginText):
    """Result of the filters `safe` and `escape`: as in Jinja, `+` escapes the other operand."""

    __slots__ = ()

    def __add__(self, other: str) -> SafeOriginText:
        joined = concat((self, escaped(other)))
        return SafeOriginText(joined, joined._origin)

    def __radd__(self, other: str) -> SafeOriginText:
        joined = concat((escaped(other), self))
        return SafeOriginText(joined, joined._origin)


def escaped(text: str) -> OriginText:
    """Escape HTML: &lt; for < and so on."""
    if isinstance(text, SafeOriginText):
        return text
    return OriginText(text, origin_of(text))._same_length(str(escape(str.__str__(text))))


def origin_of(text: str) -> str:
    return text._origin if isinstance(text, OriginText) else UNKNOWN * len(text)


def concat(pieces: Iterable[str]) -> OriginText:
    budget, length, texts = active_budget(), 0, []
    for piece in pieces:
        length += len(piece)
        budget.check(length)
        texts.append(piece)
    budget.charge_text(length)
    return OriginText("".join(texts), "".join(map(origin_of, texts)))


def with_origin(value: Any, origin: str, depth: int = 0) -> Any:
    """Return the JSON-like value with each string as a `Text` of this origin."""
    if isinstance(value, str):
        return OriginText(value, origin)
    if depth > _MAX_DEPTH:
        raise UnspoolError(f"values may be nested at most {_MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        return {key: with_origin(item, origin, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [with_origin(item, origin, depth + 1) for item in value]
    return value


_FIELD = re.compile(r"%(\([^)]*\))?[-#0 +]*(\d*)(?:\.(\d*))?[hlL]?([a-zA-Z%])")


def _format_percent(layout: OriginText, values: Any) -> OriginText:
    """`layout % values`."""
    if re.search(r"%[^a-zA-Z%]*\*", layout):
        active_budget().refuse("uses a computed field width")
    active_budget().charge_widths(layout)
    active_budget().check((1 + layout.count("%(")) * active_budget().measure(values))
    plain = str.__mod__(layout, values)
    arguments = iter(values if isinstance(values, tuple) else (values,))
    pieces: list[str] = []
    at = 0
    for field in _FIELD.finditer(layout):
        pieces.append(layout[at : field.start()])
        at = field.end()
        if field[4] == "%":
            pieces.append("%")
            continue
        value = values[field[1][1:-1]] if field[1] else next(arguments, None)
        spec = field[0].replace(field[1] or "", "", 1)
        is_plain_string = spec == "%s" and isinstance(value, str)
        pieces.append(str(value) if is_plain_string else str.__mod__(spec, (value,)))
    return result if (result := concat([*pieces, layout[at:]])) == plain else OriginText(plain)


# -- Rewrite a template's syntax tree so that every operation is charged to the budget

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


MAX_SOURCE_CHARS = 131_072  # the longest templates in use have about 20,000


class TemplateRefusalError(TemplateError):
    """The template called raise_exception."""


class MessagesRefusedError(UnspoolError):
    """A template refuses the messages; the text is the template's."""


class _Generation(Extension):
    """The tags `{% generation %}...{% endgeneration %}` around text that the model wrote."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([hook_call("generation_edge", [])]) for _ in range(2))
        return nodes.Scope([begin, *body, end], lineno=lineno)


_METHODS = re.findall(
    r"\w+",
    """
    capitalize casefold center copy count endswith expandtabs find get index isalnum isalpha
    isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper
    items join keys ljust lower lstrip partition removeprefix removesuffix replace rfind rindex
    rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper values
    zfill
    """,
)
_WIDTHS = ("center", "ljust", "rjust", "zfill", "expandtabs")


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(concat)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,  # no constant folding: it would not be charged to the budget
            finalize=_finalize,
        )
        vars(self).update(HOOKS)
        filters: dict[str, Any] = dict(self.filters)
        for name in ("urlize", "xmlattr", "wordwrap", "random"):
            del filters[name]
        filters |= {"tojson": _to_json, "join": _join, "safe": _safe}
        filters |= dict.fromkeys(("e", "escape", "forceescape"), _escape)
        self.filters = {name: _guarded_filter(name, f) for name, f in filters.items()}
        tests: dict[str, Any] = dict(self.tests)
        self.tests = {name: _guarded_test(test) for name, test in tests.items()}
        del self.globals["lipsum"]
        self.globals.update(
            range=_range,
            dict=lambda *args, **kwargs: dict(*args, **kwargs),  # without the type's attributes
            namespace=_Namespace,
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
        )

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        hook: Any = HOOKS.get(getattr(function, "__name__", ""))
        if hook is function and hook is not None:
            return hook(*args)
        budget = active_budget()
        for value in (*args, *(kwargs[name] for name in kwargs if name[0] != "_")):
            budget.measure(value)
        owner = getattr(function, "__self__", None)
        if isinstance(function, BuiltinMethodType) or isinstance(owner, str):
            name = function.__name__
            if name not in _METHODS:
                raise SecurityError(f"{type(owner).__name__}.{name} cannot be used in a template")
            budget.measure(owner)
            if isinstance(owner, str):
                function = getattr(_as_text(owner), name)
                if name in _WIDTHS and args and isinstance(args[0], int):
                    budget.charge_text(args[0] * (1 + owner.count("\t")))
        return weighed(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left_value: Any, right_value: Any) -> Any:
        budget = active_budget()
        budget.measure(left_value)
        budget.measure(right_value)
        if operator in ("*", "**"):
            budget.check_product(operator, left_value, right_value)
        return weighed(super().call_binop(context, operator, _as_text(left_value), right_value))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        owner = getattr(value, "__self__", None)
        if not isinstance(value, BuiltinMethodType | MethodType) or not isinstance(owner, str):
            return None
        formatter = _Formatter(self)
        if value.__name__ == "format":
            return lambda *args, **kwargs: formatter.vformat(owner, args, kwargs)
        if value.__name__ == "format_map":
            return lambda mapping: formatter.vformat(owner, (), mapping)
        return None


@pass_context
def _finalize(context: Context, value: Any) -> str:
    return show(value)  # with the context, so that nothing is shown while compiling


def _as_text(value: Any) -> Any:
    return (
        OriginText(value) if isinstance(value, str) and not isinstance(value, OriginText) else value
    )


class _Formatter(SandboxedFormatter):
    _total = 0

    def vformat(self, format_string: str, args: Any, kwargs: Any) -> str:
        plain = super().vformat(format_string, args, kwargs)
        if len(marks := set(origin_of(format_string))) != 1:
            return plain
        pieces: list[str] = []
        number = 0
        for literal_text, field, spec, conversion in self.parse(format_string):
            pieces.append(OriginText(literal_text, *marks))
            if field is None:
                continue
            if field[:1] in ("", ".", "["):
                field, number = f"{number}{field}", number + 1
            value = self.convert_field(self.get_field(field, args, kwargs)[0], conversion)
            is_plain_string = isinstance(value, str) and not spec
            pieces.append(value if is_plain_string else self.format_field(value, str(spec or "")))
        return result if (result := concat(pieces)) == plain else plain

    def format_field(self, value: Any, format_spec: str) -> Any:
        active_budget().charge_widths(format_spec)
        self._total += active_budget().measure(value)
        active_budget().check(self._total)
        return super().format_field(value, format_spec)


class _Namespace(Namespace):
    """Jinja's namespace, without names that begin with an underscore.

    As the only mutable value it has no contents in its repr: their size is not limited in advance.
    """

    def __repr__(self) -> str:
        return "<Namespace>"

    def __init__(*args: Any, **kwargs: Any) -> None:
        Namespace.__init__(*args, **kwargs)
        for name in dict(*args[1:], **kwargs):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}")


def _range(*args: int) -> range:
    try:
        return safe_range(*args)
    except OverflowError:
        raise TemplateLimitError("uses a range of more than 100,000") from None


def _raise_exception(message: Any = "") -> None:
    raise TemplateRefusalError(str(message) or "no reason given")


def _strftime_now(layout: str) -> str:
    if len(layout) > 200 or re.search(r"%[^a-zA-Z%]*\d", layout):
        raise TemplateLimitError("uses an excessive width in a date")
    return current_run.get().now.strftime(layout)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
             separators: Any = None, sort_keys: bool = False) -> str:  # fmt: skip
    if any((len(x) if isinstance(x, str) else x or 0) > 100 for x in (indent, *(separators or ()))):
        raise TemplateLimitError("uses JSON with more than 100 characters between values")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    chunks, length, budget = [], 0, active_budget()
    for chunk in encoder.iterencode(value):
        length += len(chunk)
        if indent:
            budget.charge_text(length)
        chunks.append(chunk)
    return "".join(chunks)


@pass_eval_context
def _join(eval_ctx: Any, value: Any, d: str = "", attribute: Any = None) -> str:
    return sync_do_join(eval_ctx, value, OriginText(d, origin_of(d)), attribute)


def _safe(value: Any) -> str:
    return SafeOriginText(text := show(value), origin_of(text))


def _escape(value: Any) -> str:
    return _safe(escaped(show(value)))


def _guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    offset = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def guard(*args: Any, **kwargs: Any) -> Any:
        budget = active_budget()
        budget.spend(4)
        values = (*args[offset:], *kwargs.values())
        sizes = [budget.measure(value) for value in values]
        if name in ("center", "indent", "batch", "slice"):  # a width or an indent for each line
            lines = values[0].count("\n") + 1 if isinstance(values[0], str) else sizes[0]
            widths = [value if isinstance(value, int) else size
                      for value, size in zip(values[1:], sizes[1:], strict=True)]  # fmt: skip
            budget.charge_text(lines * max(widths, default=0))
        elif name == "list" and isinstance(values[0], str):
            budget.check(16 * sizes[0])
        elif name == "sum" and any(isinstance(value, list | tuple) for value in values[1:]):
            budget.refuse("sums lists, which takes quadratic time")
        return weighed(function(*args[:offset], *map(_as_text, args[offset:]), **kwargs))

    return guard


def _guarded_test(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def guard(*args: Any, **kwargs: Any) -> Any:
        for value in args:
            active_budget().measure(value)
        return function(*args, **kwargs)

    return guard


class SandboxedTemplate:
    """A compiled chat template; `render` runs it in the sandbox."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise ModelFileError(
                f"the chat template has {len(source):,} characters, the limit is"
                f" {MAX_SOURCE_CHARS:,}: give another template"
            )
        environment = _Environment()
        try:
            tree = environment.parse(source)
            #: all string literals of the template
            self.literals = "\0".join(
                [data.data for data in tree.find_all(nodes.TemplateData)]
                + [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
            )
            #: whether it has generation tags
            self.marks_generation = "endgeneration" in source
            tree = Rewriter().visit(tree)
            tree.set_environment(environment)
            self._template = environment.from_string(tree)
        except TemplateSyntaxError as error:
            raise ModelFileError(
                f"the chat template is broken at line {error.lineno}: {_one_line(error.message)}"
            ) from None
        except (TemplateError, RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise ModelFileError(
                f"the chat template cannot be compiled: {_one_line(error) or type(error).__name__}"
            ) from None

    def render(
        self,
        variables: Mapping[str, Any],
        *,
        now: datetime | None = None,
        mark_generation: bool = False,
    ) -> OriginText:
        """Return the rendered text. The variables must be plain JSON-like values.

        With `mark_generation`, GENERATION_EDGE marks both edges of generation blocks.
        """
        run = RenderState(variables.get("messages", ()), now or datetime.now(), mark_generation)
        tokens = current_budget.set(TemplateBudget(variables)), current_run.set(run)
        try:
            return concat(
                self._template.root_render_func(self._template.new_context(dict(variables)))
            )
        except Exception as error:  # a template can raise any exception
            raise _to_unspool_error(error) from None
        finally:
            current_budget.reset(tokens[0])
            current_run.reset(tokens[1])


def _to_unspool_error(error: Exception) -> UnspoolError:
    message = _one_line(error) or type(error).__name__
    if isinstance(error, TemplateRefusalError):
        return MessagesRefusedError(f"the chat template refuses these messages: {message}")
    if isinstance(error, SecurityError):
        return ModelFileError(f"the chat template does something that is not allowed: {message}")
    limits = (TemplateLimitError, MemoryError, OverflowError, RecursionError)
    if not isinstance(error, limits):
        return ModelFileError(f"the chat template failed: {message}")
    if not isinstance(error, TemplateLimitError):
        recursion = isinstance(error, RecursionError)
        message = "recurses without end" if recursion else "needs too much memory"
    return ModelFileError(f"the chat template {message}: it is broken or hostile, give another one")


def _one_line(error: object) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."
