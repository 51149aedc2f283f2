"""Tool calling formats: how tools are described to a model, and how it writes a call.

    format = tool_format(tokenizer.chat_template, tokenizer)
    messages, tools = format.prepared(messages, [Tool("weather", "Weather of a city", schema)])
    prompt = ChatTemplate(tokenizer.chat_template, tokenizer).encode(messages, tools=tools)
    format.grammar(tools, parallel=False)     # for an output that must be a call

Each model family has its own format, which its chat template shows. The family is recognized by the
marks in the template's source; rendering a small conversation shows what the template does with
tools, calls and system messages. A template that writes no tools, or uses an unsupported syntax,
gets the generic format: tools and syntax are described in the system message, and calls and results
of earlier turns are plain text. `ToolCallReader` parses the calls, `ChannelReader` those of
harmony.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unspool.errors import UnspoolError
from unspool.text.chat.messages import Message
from unspool.text.chat.template import ChatTemplate, TokenizerLike
from unspool.text.tools.call_literals import QUOTE
from unspool.text.tools.messages import (
    add_instructions,
    calls_to_text,
    results_to_text,
    shorten_call_ids,
    split_calls,
    text_to_reasoning,
    validate_calls,
)
from unspool.text.tools.syntaxes import call_rules, write_call


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

# As in sampling/grammar_spec.py: unlimited whitespace would allow endless output.
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
