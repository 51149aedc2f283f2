"""Tool calling formats: how tools are described to a model, and how it writes a call.

    format = tool_format(tokenizer.chat_template, tokenizer)
    messages, tools = format.prepared(messages, [Tool("weather", "Weather of a city", schema)])
    prompt = ChatTemplate(tokenizer.chat_template, tokenizer).encode(messages, tools=tools)
    format.grammar(tools, parallel=False)     # for an output that must be a call

Each model family has its own format, which its chat template shows. The family is recognized by the
marks in the template's source; rendering a small conversation shows what the template does with
tools, calls and system messages. A template that writes no tools, or uses an unsupported syntax,
gets the generic format: tools and syntax are described in the system message, and calls and results
of earlier turns are text. `ToolCallParser` parses the calls, `HarmonyParser` those of harmony.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from unspool.errors import UnspoolError
from unspool.text.chat.messages import Message, join_text_parts, validate_messages
from unspool.text.tools.call_parsers import QUOTE

if TYPE_CHECKING:
    from unspool.text.chat.template import ChatTemplate, TokenizerLike

# -- Convert conversations with tool calls from OpenAI's format to that of a chat template

Messages = list[dict[str, Any]]


def validate_calls(messages: Sequence[Message]) -> Messages:
    """Return copies of the messages, with arguments as objects and the function name in results.

    Raises UnspoolError for a call without a name or whose arguments are not a JSON object, and for
    a result without a call.
    """
    names: dict[str, str] = {}  # function names of the calls so far, by id
    checked = []
    for number, message in enumerate(validate_messages(messages), start=1):
        # Templates test whether tool_calls is defined, so drop empty ones.
        copy = {key: value for key, value in message.items() if value is not None}
        copy.setdefault("content", "")
        where = f"message {number} ({copy['role']})"
        calls = copy.pop("tool_calls", None)
        if calls:
            if not isinstance(calls, list):
                raise UnspoolError(f"{where}: tool_calls must be a list")
            copy["tool_calls"] = [_validate_call(call, where) for call in calls]
            for call in copy["tool_calls"]:
                if "id" in call:
                    names[call["id"]] = call["function"]["name"]
        if copy["role"] == "tool":
            call_id = copy.get("tool_call_id")
            if not isinstance(call_id, str) or call_id not in names:
                raise UnspoolError(
                    f"{where} answers the tool call {call_id!r:.80}, which is in no message before"
                    " it: give the tool_call_id of an assistant's call"
                )
            copy.setdefault("name", names[call_id])
        checked.append(copy)
    return checked


def _validate_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise UnspoolError(f"{where}: a tool call needs a function with a name, got {call!r:.80}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise UnspoolError(
                f"{where}: the arguments of the tool call {name!r:.80} are not JSON"
            ) from None
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise UnspoolError(
            f"{where}: the arguments of the tool call {name!r:.80} are not a JSON object"
        )
    checked = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if isinstance(call.get("id"), str):
        checked = {"id": call["id"], **checked}
    return checked


def split_calls(messages: Messages) -> Messages:
    """Split messages with several calls into one message per call, each followed by its result."""
    converted: Messages = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = message.get("tool_calls", [])
        if len(calls) < 2:
            converted.append(message)
            continue
        results: Messages = []
        while position < len(messages) and messages[position]["role"] == "tool":
            results.append(messages[position])
            position += 1
        for number, call in enumerate(calls):
            content = message["content"] if number == 0 else ""
            converted.append({**message, "content": content, "tool_calls": [call]})
            converted += [result for result in results if result["tool_call_id"] == call.get("id")]
        ids = {call.get("id") for call in calls}
        converted += [result for result in results if result["tool_call_id"] not in ids]
    return converted


def text_to_reasoning(messages: Messages) -> Messages:
    """Move text next to a call into the reasoning before it, for templates that do not allow both:
    harmony's refuses it, and Gemma's ends the turn after it."""
    converted = []
    for message in messages:
        text = _text(message) if message.get("tool_calls") else ""
        if text:
            reasoning = "\n\n".join(filter(None, (message.get("reasoning_content"), text)))
            fields = {"reasoning_content": reasoning, "thinking": reasoning, "content": ""}
            message = {**message, **fields}
        converted.append(message)
    return converted


def shorten_call_ids(messages: Messages) -> Messages:
    """Shorten ids to nine letters and digits, as Mistral's templates require; deterministic."""
    for message in messages:
        for number, call in enumerate(message.get("tool_calls", [])):
            call["id"] = _short_id(call.get("id", f"call {number}"))
        if message["role"] == "tool":
            message["tool_call_id"] = _short_id(message["tool_call_id"])
    return messages


def _short_id(name: str) -> str:
    if re.fullmatch(r"[a-zA-Z0-9]{9}", name):
        return name
    letters = string.ascii_letters + string.digits
    return "".join(letters[byte % 62] for byte in hashlib.sha256(name.encode()).digest()[:9])


def calls_to_text(
    messages: Messages, write_calls: Callable[[Sequence[Mapping[str, Any]]], str]
) -> Messages:
    """Write calls into the content, for a template that does not write them."""
    converted = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            text = write_calls([call["function"] for call in calls])
            content = _text(message)
            fields = {key: value for key, value in message.items() if key != "tool_calls"}
            message = {**fields, "content": f"{content}\n{text}" if content else text}
        converted.append(message)
    return converted


def results_to_text(messages: Messages) -> Messages:
    """Convert results to user messages, for a template without the role `tool`.

    Consecutive results and the user's next message become one message: many templates require that
    user and assistant alternate.
    """
    converted: Messages = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{_text(message)}\n</tool_response>"
            message = {"role": "user", "content": text}
        if after_result and message["role"] == "user":
            converted[-1] = {
                **converted[-1],
                "content": f"{converted[-1]['content']}\n{_text(message)}",
            }
        else:
            converted.append(message)
        after_result = is_result
    return converted


def add_instructions(messages: Messages, text: str, takes_system: bool) -> Messages:
    """Append a text to the system message, or add it as a new one.

    If the template supports no system message, it is put before the first user message.
    """
    first = messages[0]
    if first["role"] == "system":
        content = _text(first)
        return [{**first, "content": f"{content}\n\n{text}" if content else text}, *messages[1:]]
    if not takes_system and first["role"] == "user":
        return [{**first, "content": f"{text}\n\n{_text(first)}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _text(message: Mapping[str, Any]) -> str:
    text: str = join_text_parts(dict(message))["content"]
    return text


# -- Lark grammars for the arguments of tool calls in other syntaxes than JSON

NUMBERS = r"""
INTEGER: /-?(0|[1-9][0-9]{0,18})/
NUMBER: /-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,3})?/
"""


class LiteralGrammar:
    """Grammar of the values of one syntax, by their schema."""

    def __init__(
        self, *, quote: str, text: str, words: tuple[str, str, str], comma: str, colon: str
    ) -> None:
        self._quote = quote  # as written in the grammar
        self._text = text  # any string; MOST is replaced by the length bounds
        self._true, self._false, self._null = words
        self._comma, self._colon = comma, colon

    def value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            return "any_value"
        if "const" in schema:
            return self._constant(schema["const"])
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return f"({' | '.join(self._constant(choice) for choice in schema['enum'])})"
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list) and schema[name]:
                return f"({' | '.join(self.value(choice) for choice in schema[name])})"
        kinds = schema.get("type")
        if isinstance(kinds, list) and kinds:
            return f"({' | '.join(self.value({**schema, 'type': kind}) for kind in kinds)})"
        return self._of_type(kinds, schema)

    def _of_type(self, kind: Any, schema: Mapping[str, Any]) -> str:
        if kind == "array":
            item = self.value(schema.get("items"))
            return f'"[" ({item} ({_literal(self._comma)} {item})*)? "]"'
        if kind == "object" and isinstance(schema.get("properties"), Mapping):
            return f'"{{" {self.fields(schema, self._colon)} "}}"'
        rules = {"string": self._string(schema), "integer": "INTEGER", "number": "NUMBER",
                 "boolean": f"({_literal(self._true)} | {_literal(self._false)})",
                 "null": _literal(self._null)}  # fmt: skip
        return rules.get(kind, "any_value") if isinstance(kind, str) else "any_value"

    def _string(self, schema: Mapping[str, Any]) -> str:
        longest = schema.get("maxLength")
        most = f"0,{longest}" if isinstance(longest, int) and longest >= 0 else "0,"
        return self._text.replace("MOST", most)

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"({self._quote} {_literal(value)} {self._quote})"
        words = {True: self._true, False: self._false, None: self._null}
        is_word = value is None or isinstance(value, bool)
        return _literal(words[value] if is_word else json.dumps(value))

    def fields(self, schema: Mapping[str, Any], colon: str) -> str:
        """Return the rule of an object's properties, in order; optional ones may be missing."""
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        rules = [
            (f"{_literal(f'{name}{colon}')} {self.value(inner)}", name in required)
            for name, inner in properties.items()
        ]
        following = ""  # the fields after this one, if others precede them
        leading = ""  # ... and if none does
        for rule, is_required in reversed(rules):
            first = f"{rule} {following}".strip()
            optional = f"({first} | {leading})" if leading else f"({first})?"
            leading = first if is_required else optional
            later = f"{_literal(self._comma)} {rule}"
            following = f"{later if is_required else f'({later})?'} {following}".strip()
        return leading

    def rules(self) -> str:
        """Return the rules that the values refer to."""
        comma, colon = _literal(self._comma), _literal(self._colon)
        words = " | ".join(map(_literal, (self._true, self._false, self._null)))
        return f"""any_value: {self._string({})} | NUMBER | {words} | any_list | any_object
any_list: "[" (any_value ({comma} any_value)*)? "]"
any_object: "{{" (any_field ({comma} any_field)*)? "}}"
any_field: KEY {colon} any_value
KEY: /[A-Za-z_][A-Za-z0-9_]{{0,63}}/
{NUMBERS}"""


def python_literals() -> LiteralGrammar:
    return LiteralGrammar(
        quote='"\'"',
        text=r"""/'([^'\\\n]|\\.){MOST}'/""",
        words=("True", "False", "None"),
        comma=", ",
        colon=": ",
    )


def gemma_literals(quote: str) -> LiteralGrammar:
    return LiteralGrammar(
        quote=quote,
        text=f"({quote} (/[^<]{{MOST}}/)? {quote})",
        words=("true", "false", "null"),
        comma=",",
        colon=":",
    )


def tagged_parameters(schema: Mapping[str, Any], rules: dict[str, str]) -> str:
    """Return the rule of a call's parameters as tags; adds the rules that it refers to.

    A string may contain anything except its end tag.
    """
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    parts: list[str] = []
    for name, inner in properties.items():
        begin, end = _literal(f"<parameter={name}>\n"), "\n</parameter>\n"
        if isinstance(inner, Mapping) and _are_texts(inner.get("enum")):
            choices = " | ".join(_literal(f"{choice}{end}") for choice in inner["enum"])
            rule = f"{begin} ({choices})"
        elif isinstance(inner, Mapping) and inner.get("type") == "string":
            most = inner.get("maxLength") if isinstance(inner.get("maxLength"), int) else ""
            text = f"text_{most}" if most != "" else "text"
            rules[text] = f"{text}[suffix={_literal(end)}]: /(?s:.{{0,{most}}})/"
            rule = f"{begin} {text}"
        else:
            rule = f"{begin} %json {json.dumps(inner)} {_literal(end)}"
        parts.append(rule if name in required else f"({rule})?")
    return " ".join(parts)


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# -- Tool calls in other syntaxes than JSON: writing them, and grammar rules for required calls


def write_call(syntax: str, name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as the model would write it, without marks."""
    if syntax == "tags":
        values = {key: _parameter_text(value) for key, value in arguments.items()}
        inside = [f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in values.items()]
        return f"<function={name}>\n{''.join(inside)}</function>"
    if syntax == "gemma":
        fields = [f"{key}:{_gemma_literal(arguments[key])}" for key in sorted(arguments)]
        return f"call:{name}{{{','.join(fields)}}}"
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _parameter_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _gemma_literal(value: Any) -> str:
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_gemma_literal(value[key])}' for key in sorted(value))}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_gemma_literal, value))}]"
    return json.dumps(value)


def call_rules(
    syntax: str, tools: Sequence[tuple[str, Mapping[str, Any]]], quote: str
) -> list[str]:
    """Return rules `call_0`, `call_1`, ... for the functions, and the rules they refer to.

    `quote` is Gemma's quote as a grammar literal.
    """
    rules: dict[str, str] = {}
    calls: list[str] = []
    literals: LiteralGrammar | None = None
    if syntax != "tags":
        literals = gemma_literals(quote) if syntax == "gemma" else python_literals()
        rules["literals"] = literals.rules()
    for number, (name, schema) in enumerate(tools):
        if literals is None:
            begin, end = f"<function={name}>\n", "</function>"
            parameters = tagged_parameters(schema, rules)
        elif syntax == "gemma":
            begin, end = f"call:{name}{{", "}"
            ordered = dict(sorted((schema.get("properties") or {}).items()))
            parameters = literals.fields({**schema, "properties": ordered}, ":")
        else:
            begin, end = f"{name}(", ")"
            parameters = literals.fields(schema, "=")
        calls.append(f"call_{number}: {json.dumps(begin)} {parameters} {json.dumps(end)}")
    return [*calls, *rules.values()]


@dataclass(frozen=True)
class ToolSpec:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)  # JSON schema of its arguments

    def as_openai(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolFormat:
    """How one model family writes calls; the defaults are the Hermes format.

    hermes   <tool_call>{"name": "f", "arguments": {}}</tool_call>
    llama3   {"name": "f", "parameters": {}}              the whole answer, or after <|python_tag|>
    mistral  [TOOL_CALLS][{"name": "f", "arguments": {}}]
    mistral-args  [TOOL_CALLS]f[ARGS]{}
    granite  <|tool_call|>[{"name": "f", "arguments": {}}]
    phi      functools[{"name": "f", "arguments": {}}]
    phi-tags <|tool_call|>{"name": "f", "arguments": {}}<|/tool_call|>
    xml      <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
    gemma    <|tool_call>call:f{x:1}<tool_call|>
    lfm2     <|tool_call_start|>[f(x=1)]<|tool_call_end|>
    harmony  <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>
    """

    name: str
    in_template: bool = True  # the chat template itself writes the tools
    syntax: str = "json"  # of the text between the marks: json, tags, gemma, python, channels
    begin: str = "<tool_call>"
    end: str = "</tool_call>"  # '' if there is no end mark
    key: str = "arguments"
    space: str = ""  # between the marks and the call
    listed: bool = False  # the calls are one JSON list
    named: bool = False  # the name is outside of the JSON
    bare: bool = False  # a text that begins with the JSON object is a call, without a mark
    between: str = "\n"  # separator of calls
    one_call_per_message: bool = False  # the template supports one call per message
    short_ids: bool = False  # the template requires ids of nine letters and digits
    call_id: bool = False  # [CALL_ID] comes between name and arguments
    writes_calls: bool = True  # the template writes the calls of earlier turns
    takes_system: bool = True  # the template supports a system message
    controls: Mapping[str, int] = field(default_factory=dict)  # marks that are control tokens

    def prepare_messages(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Convert OpenAI messages and tools to the arguments of `ChatTemplate.encode`.

        Raises UnspoolError if a call or a result in the messages is invalid.
        """
        converted = validate_calls(messages)
        if self.one_call_per_message:
            converted = split_calls(converted)
        if self.syntax in ("channels", "gemma"):
            converted = text_to_reasoning(converted)
        if self.short_ids:
            converted = shorten_call_ids(converted)
        if not self.writes_calls:
            converted = calls_to_text(converted, self.write_calls)
        tool_schemas = [tool.as_openai() for tool in tools]
        if self.in_template:
            return converted, tool_schemas or None
        converted = results_to_text(converted)
        if tool_schemas:
            converted = add_instructions(
                converted, self._instructions(tool_schemas), self.takes_system
            )
        return converted, None

    def write_calls(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Return calls (name and arguments) as the model would write them."""
        if self.syntax not in ("json", "channels"):
            texts = [write_call(self.syntax, c["name"], c["arguments"]) for c in calls]
        else:
            texts = [_json({"name": call["name"], self.key: call["arguments"]}) for call in calls]
        if self.listed:
            return f"{self.begin}[{', '.join(texts)}]{self.end}"
        if self.bare or self.syntax == "channels":
            return self.between.join(texts)
        return self.between.join(
            f"{self.begin}{self.space}{text}{self.space}{self.end}" for text in texts
        )

    def grammar(self, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return the Lark grammar of an output that must be a call of one of these tools.

        With `parallel`, of one or more calls.
        """
        if not tools:
            raise UnspoolError("a tool call is required, but there are no tools: give tools")
        begin, end = self._mark(self.begin), self._mark(self.end)
        separator = _quoted(", " if self.listed else self.between)
        if self.syntax == "channels":
            parallel = False  # the end mark of a call ends the text
        if self.listed:
            start = f'{begin} " "? "[" call{f" ({separator} call)*" if parallel else ""} "]" {end}'
        elif self.named:  # each call has its mark, without a separator
            start = f"({begin} call){'+' if parallel else ''}"
        else:
            space = _quoted(self.space)
            call = "call" if self.bare else f"{begin} {space} call {space} {end}"
            start = f"{call}{f' ({separator} {call})*' if parallel else ''}"
        rules = [f"start: {start}", "call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
        if self.syntax not in ("json", "channels"):
            schemas = [(tool.name, _without_annotations(tool.parameters)) for tool in tools]
            return "\n".join([*rules, *call_rules(self.syntax, schemas, self._mark(QUOTE))]) + "\n"
        for i, tool in enumerate(tools):
            schema = f"%json {json.dumps(_arguments_schema(tool.parameters))}"
            if self.named:
                call_id = f"({self._mark('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)?" if self.call_id else ""
                head, tail = f"{_quoted(tool.name)} {call_id} {self._mark('[ARGS]')}", ""
            elif self.syntax == "channels":
                to, kind = _quoted(f"commentary to=functions.{tool.name} "), _quoted("json")
                head = f"{to} {self._mark('<|constrain|>')} {kind} {self._mark('<|message|>')}"
                tail = ""
            else:
                head = _quoted(f'{{"name": {_json(tool.name)}, "{self.key}": ')
                tail = _quoted("}")
            rules.append(f"call_{i}: {head} {schema} {tail}")
        return "\n".join(rules) + "\n"

    def _mark(self, text: str) -> str:
        """Return a mark for a grammar: a control token by its id, others as text."""
        if text in self.controls and self.in_template:
            return f"<[{self.controls[text]}]>"
        return _quoted(text)

    def _instructions(self, tools: Sequence[Mapping[str, Any]]) -> str:
        lines = "\n".join(_json(tool) for tool in tools)
        example = _json({"name": "function-name", self.key: {"parameter": "value"}})
        return (
            "You can call functions. Here is what each of them is and takes:\n"
            f"<tools>\n{lines}\n</tools>\n\n"
            "To call one, answer with its name and its arguments as JSON, like this:\n"
            f"{self.begin}\n{example}\n{self.end}\n"
            "Its result then comes back to you within <tool_response></tool_response>. "
            "Where no function helps, answer in plain words."
        )


_HERMES = ToolFormat("hermes", space="\n")
_GENERIC = replace(_HERMES, name="generic", in_template=False, writes_calls=False)
_LLAMA3 = ToolFormat(
    "llama3",
    begin="<|python_tag|>",
    end="",
    key="parameters",
    bare=True,
    between="; ",
    one_call_per_message=True,
)
_MISTRAL = ToolFormat("mistral", begin="[TOOL_CALLS]", end="", listed=True, short_ids=True)
_MISTRAL_ARGS = replace(_MISTRAL, name="mistral-args", listed=False, named=True, between="")
_GRANITE = ToolFormat("granite", begin="<|tool_call|>", end="", listed=True)
_PHI_TAGS = ToolFormat("phi-tags", begin="<|tool_call|>", end="<|/tool_call|>", between="")
_PHI = ToolFormat("phi", begin="functools", end="", listed=True)

_TAGS = ToolFormat("xml", syntax="tags", space="\n")
_GEMMA = ToolFormat("gemma", syntax="gemma", begin="<|tool_call>", end="<tool_call|>", between="")
_LFM2 = ToolFormat(
    "lfm2", syntax="python", begin="<|tool_call_start|>", end="<|tool_call_end|>", listed=True
)
_HARMONY = ToolFormat(
    "harmony", syntax="channels", begin="<|channel|>", end="", one_call_per_message=True
)

# Calls in other tags: the same outer mark as Hermes, but without JSON.
_NOT_JSON = ("<arg_key>", "<parameter ")


def tool_format(template: str | None, tokenizer: TokenizerLike) -> ToolFormat:
    """Return the tool format of a chat template; None is a model without one."""
    from unspool.text.chat.template import ChatTemplate  # imports Jinja

    fmt = _GENERIC if template is None else _format_by_marks(template, tokenizer.special_tokens)
    chat = ChatTemplate(template, tokenizer)
    if fmt is not _GENERIC and not _writes_probe(chat, _CALLED[:1], ToolSpec(_PROBE)):
        fmt = _GENERIC  # it may write calls, but no tools
    other = ToolSpec("other") if fmt.in_template else None  # some fail without tools
    marks = (fmt.begin, fmt.end, "[ARGS]", "[CALL_ID]", QUOTE, "<|constrain|>", "<|message|>")
    special_tokens = tokenizer.special_tokens
    return replace(
        fmt,
        controls={mark: special_tokens[mark] for mark in marks if mark in special_tokens},
        call_id=fmt.named and "[CALL_ID]" in (template or ""),
        writes_calls=fmt is not _GENERIC and _writes_probe(chat, _CALLED, other),
        takes_system=_writes_probe(
            chat, [{"role": "system", "content": _PROBE}, *_CALLED[:1]], other
        ),
    )


def _format_by_marks(template: str, controls: Mapping[str, int]) -> ToolFormat:
    if "<|channel|>" in template and "functions." in template:
        return _HARMONY
    if "<|tool_call>" in template:
        return _GEMMA
    if "<|tool_call_start|>" in template or "<|tool_call_start|>" in controls:
        return _LFM2
    if any(mark in template for mark in _NOT_JSON):
        return _GENERIC
    if "<function=" in template and "<parameter=" in template:
        return _TAGS if "<tool_call>" in template else _GENERIC
    if "[TOOL_CALLS]" in template:
        return _MISTRAL_ARGS if "[ARGS]" in template else _MISTRAL
    if "<tool_call>" in template:
        return _HERMES if "arguments" in template else _GENERIC
    if "<|tool_call|>" in template:
        return _PHI_TAGS if "<|/tool_call|>" in template else _GRANITE
    if "functools[" in template:
        return _PHI
    if "<|python_tag|>" in template or ('{"name"' in template and '"parameters"' in template):
        return _LLAMA3
    return _GENERIC


# Rendered to find out what a template does.
_PROBE = "probe_of_tools"
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": _PROBE, "arguments": {}}}
_CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "1", "name": "f", "tool_call_id": "abcdefghi"},
]


def _writes_probe(chat: ChatTemplate, messages: Sequence[Message], tool: ToolSpec | None) -> bool:
    """Return whether the template writes `_PROBE`; False also if it refuses the messages."""
    try:
        return _PROBE in chat.render_as_is(messages, tools=[tool.as_openai()] if tool else None)
    except UnspoolError:
        return False


# Grammars.

# As in sampling/grammar.py: unlimited whitespace would allow endless output.
_WHITESPACE = r"\x20|\n\x20{0,40}"
_ANNOTATIONS = ("description", "title", "examples", "default", "$comment")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def _arguments_schema(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the arguments: an object, without properties if there are none."""
    schema: dict[str, Any] = _without_annotations(parameters or {"properties": {}})
    if not parameters:
        schema["additionalProperties"] = False
    schema["type"] = "object"
    settings = {"whitespace_pattern": _WHITESPACE, "coerce_one_of": True}
    return {"x-guidance": settings, **schema}


def _without_annotations(schema: Any) -> Any:
    """Return a schema without annotations: the grammar's size is limited."""
    if isinstance(schema, list):
        return [_without_annotations(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for name, value in schema.items():
        if name in ("enum", "const", "required"):
            result[name] = value
        elif name in _NAMED_SCHEMAS and isinstance(value, dict):
            result[name] = {item: _without_annotations(inner) for item, inner in value.items()}
        elif name not in _ANNOTATIONS:
            result[name] = _without_annotations(value)
    return result


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _quoted(text: str) -> str:
    """Return a string literal for a Lark grammar; nothing for "", which Lark does not allow."""
    return _json(text) if text else ""
