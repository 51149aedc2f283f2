"""Run a chat template that nobody has read: the Jinja dialect of transformers, in a cage.

A chat template is a program that came with a download. Jinja's sandbox keeps it away from files and
from Python's insides; what it does not stop is a template that never ends or fills the memory. So
the template is rewritten before it is compiled (`template_rewrite.py`), and here filters, tests,
methods and operators are weighed before they run. All of it draws on one budget
(`template_budget.py`), counted, not timed, so that the same template always ends in the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, safe_range
from jinja2.utils import Namespace

from unspool.errors import ModelFileError, UnspoolError
from unspool.text.chat.budget import TemplateLimitError
from unspool.text.chat.marks import Marks, words
from unspool.text.chat.rewrite import (
    CALLED_BY_TEMPLATE,
    Rewriter,
    Run,
    compare,
    current_run,
    enter_body,
    enter_loop,
    join_texts,
    take_slice,
)

LONGEST_SOURCE = 131_072  # characters; the longest templates in use have about 20,000


class TemplateRefusalError(TemplateError):
    """The template itself said no, by raise_exception."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: marks what the model wrote; here it just shows."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Cage(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    enter_loop = staticmethod(enter_loop)
    enter_body = staticmethod(enter_body)
    join_texts = staticmethod(join_texts)
    take_slice = staticmethod(take_slice)
    compare = staticmethod(compare)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,  # nothing may be computed while compiling, outside the budget
            finalize=_show,
        )
        for name in ("urlize", "xmlattr", "wordwrap", "random"):
            del self.filters[name]
        self.filters["tojson"] = _to_json
        self.filters = {name: _guarded_filter(name, f) for name, f in self.filters.items()}
        tests: dict[str, Any] = dict(self.tests)
        self.tests = {name: _guarded_test(name, test) for name, test in tests.items()}
        del self.globals["lipsum"]
        self.globals.update(
            range=_range,
            dict=_Dict(),
            namespace=_Namespace,
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
        )

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if function in CALLED_BY_TEMPLATE:
            return function(*args)
        budget = current_run.get().budget
        if isinstance(function, BuiltinMethodType):
            for hidden in ("_loop_vars", "_block_vars"):  # the compiler's, for context functions
                kwargs.pop(hidden, None)
            return _call_method(current_run.get(), function, args, kwargs)
        if isinstance(function, MethodType):  # loop.changed compares, for example
            for value in (*args, *kwargs.values()):
                budget.weigh(value)
        budget.spend(1 + len(args) + len(kwargs))
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        current_run.get().budget.check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        run = current_run.get()
        if run.marks is not None:
            if run.marked(obj) and isinstance(argument, int):
                found = run.marks.slice(obj, slice(argument, argument + 1 or None))
                return found or self.undefined(obj=obj, name=str(argument))
            if run.marked(argument) and isinstance(obj, dict) and argument not in obj:
                argument = run.marks.plain(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if not isinstance(value, BuiltinMethodType) or not isinstance(value.__self__, str):
            return None
        text = str(value.__self__)
        formatter = _Formatter(self)
        if value.__name__ == "format":
            return lambda *args, **kwargs: formatter.vformat(text, args, kwargs)
        if value.__name__ == "format_map":
            return lambda mapping: formatter.vformat(text, (), mapping)
        return None


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        budget = current_run.get().budget
        budget.check_widths(format_spec)
        budget.weigh(value)
        return super().format_field(value, format_spec)


class _Namespace(Namespace):
    """Jinja's namespace without names that begin with an underscore."""

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


class _Dict:
    """`dict(...)` without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _range(*args: int) -> range:
    try:
        return safe_range(*args)
    except OverflowError:
        raise TemplateLimitError("counts over a range of more than 100,000") from None


def _raise_exception(message: Any = "") -> None:
    raise TemplateRefusalError(str(message))


def _strftime_now(layout: str) -> str:
    if len(layout) > 200 or re.search(r"%[^a-zA-Z%]*\d", layout):
        raise TemplateLimitError("asks for a date of absurd width")
    return current_run.get().now.strftime(layout)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
             separators: Any = None, sort_keys: bool = False) -> str:  # fmt: skip
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    mark = current_run.get().mark
    if ensure_ascii and mark != "\0":  # an escaped mark is turned back into the mark
        escape = re.escape(json.dumps(mark)[1:-1])
        text = re.sub(rf"(?<!\\)((?:\\\\)*){escape}", rf"\g<1>{mark}", text)
    return text


@pass_context
def _show(context: Context, value: Any) -> str:
    """Every `{{ ... }}` passes here on its way out."""
    budget = current_run.get().budget
    budget.weigh(value)
    text = value if isinstance(value, str) else str(value)
    budget.text(len(text))
    return text


_SHALLOW = words(
    "length count first last list map select reject selectattr rejectattr default d items attr"
    " reverse safe batch slice"
)
_SIZED = words("center indent batch slice truncate tojson")
_MARKED_METHODS = {name: name for name in ("replace", "capitalize", "title")} | {"trim": "strip"}
_ON_PLAIN = words("length count int float urlencode wordcount")


def _guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    offset = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def guard(*args: Any, **kwargs: Any) -> Any:
        run = current_run.get()
        budget, values = run.budget, (*args[offset:], *kwargs.values())
        for each in values:
            budget.spend_shallow(each) if name in _SHALLOW else budget.weigh(each)
        if name in _SIZED:
            budget.check_sizes(values[1:])
        budget.check_filter(name, values)
        value: Any = args[offset] if len(args) > offset else None
        if run.marks is not None and any(map(run.marked, values)):
            if name in _MARKED_METHODS:
                return run.marks.call(_MARKED_METHODS[name], value, args[offset + 1 :], kwargs)
            if name in _ON_PLAIN:
                args = (*args[:offset], run.bare(value), *args[offset + 1 :])
        result = function(*args, **kwargs)
        if isinstance(result, str):
            budget.text(len(result))
        return result

    return guard


def _guarded_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def guard(*args: Any, **kwargs: Any) -> Any:
        run = current_run.get()
        run.budget.spend(1)
        if len(args) > 1 and name != "sameas":
            for each in args:
                run.budget.weigh(each)
            args = tuple(map(run.bare, args))
        return function(*args, **kwargs)

    return guard


_METHODS: dict[type, frozenset[str]] = {
    str: words(
        "capitalize casefold center count endswith expandtabs find index isalnum isalpha isascii"
        " isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join"
        " ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust"
        " rpartition rsplit rstrip split splitlines startswith strip swapcase title upper"
        " zfill"
    ),
    dict: words("get items keys values copy"),
    list: words("index count copy"),
    tuple: words("index count"),
}


def _call_method(
    run: Run, method: BuiltinMethodType, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    owner, name = method.__self__, method.__name__
    kind = next((kind for kind in _METHODS if isinstance(owner, kind)), None)
    if kind is None or name not in _METHODS[kind]:
        raise SecurityError(f"{type(owner).__name__}.{name} cannot be used in a chat template")
    if kind is dict:
        run.budget.spend(1)
        return method(*args, **kwargs)
    if name == "join" and args:
        args = (list(args[0]), *args[1:])
    for value in (owner, *args, *kwargs.values()):
        run.budget.weigh(value)
    run.budget.check_method(name, owner, args)
    if kind is str and run.marks is not None and any(map(run.marked, (owner, *args))):
        return run.marks.call(name, str(owner), args, kwargs)
    return method(*args, **kwargs)


class SandboxedTemplate:
    """A chat template, compiled; `render` runs it in the cage."""

    def __init__(self, source: str) -> None:
        if len(source) > LONGEST_SOURCE:
            raise ModelFileError(
                f"the chat template has {len(source):,} characters, more than the"
                f" {LONGEST_SOURCE:,} that are accepted: give another template"
            )
        cage = _Cage()
        try:
            tree = cage.parse(source)
            #: all that the template can spell by itself
            self.literals = "\0".join(
                [data.data for data in tree.find_all(nodes.TemplateData)]
                + [each.value for each in tree.find_all(nodes.Const) if isinstance(each.value, str)]
            )
            tree = Rewriter().visit(tree)
            tree.set_environment(cage)
            self._template = cage.from_string(tree)
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
        marks: Marks | None = None,
        now: datetime | None = None,
        message_marks: Mapping[int, str] | None = None,
    ) -> str:
        """The text the template writes. The variables must be plain JSON-like values."""
        run = Run(variables, marks, now or datetime.now(), message_marks or {})
        before = current_run.set(run)
        try:
            text = self._template.root_render_func(self._template.new_context(dict(variables)))
            rendered = "".join(text)
            run.budget.text(len(rendered))
            return rendered
        except TemplateRefusalError as error:
            message = _one_line(error.message or "no reason given", run)
            raise UnspoolError(f"the chat template refuses these messages: {message}") from None
        except (TemplateLimitError, MemoryError, OverflowError) as error:
            message = _one_line(error, run) or "needs too much memory"
            raise ModelFileError(
                f"the chat template {message}: it is broken or hostile, give another one"
            ) from None
        except RecursionError:
            raise ModelFileError(
                "the chat template calls itself without end: it is broken or hostile,"
                " give another one"
            ) from None
        except SecurityError as error:
            message = _one_line(error, run)
            raise ModelFileError(f"the chat template does what it may not: {message}") from None
        except Exception as error:  # a template can run into any error that Python has
            message = _one_line(error, run) or type(error).__name__
            raise ModelFileError(f"the chat template failed: {message}") from None
        finally:
            current_run.reset(before)


def _one_line(error: object, run: Run | None = None) -> str:
    text = " ".join(str(error).split())
    if run is not None and run.marks is not None:
        text = run.marks.plain(text)
    return text if len(text) <= 300 else text[:297] + "..."
