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
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import nodes, pass_context, pass_eval_context
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import sync_do_join
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, safe_range
from jinja2.utils import Namespace

from unspool.errors import ModelFileError, UnspoolError
from unspool.text.chat.budget import (
    TemplateBudget,
    TemplateLimitError,
    active_budget,
    current_budget,
)
from unspool.text.chat.origin import OriginText, SafeOriginText, concat, escaped, origin_of
from unspool.text.chat.rewrite import (
    HOOKS,
    RenderState,
    Rewriter,
    current_run,
    hook_call,
    show,
    weighed,
)

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
