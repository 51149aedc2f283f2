"""A conversation on its way to the model: ids, options, and how tool calls are read.

Every API that knows conversations is turned into a `ChatRequest` first, and comes through here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unspool.engine.thinking import CALL, Thinking
from unspool.sampling import GrammarSpec
from unspool.serve.core.options import (
    check_one_grammar,
    check_stream_options,
    compile_schema,
    prediction_drafter,
    sampling_options,
)
from unspool.serve.core.registry import ServedModel
from unspool.serve.core.schema import join_parts
from unspool.serve.core.state import Call
from unspool.serve.http.errors import bad_request
from unspool.serve.http.notes import ignore
from unspool.serve.openai.chat_schema import (
    AllowedToolsChoice,
    ChatRequest,
    FunctionTool,
    Message,
    NamedTool,
)
from unspool.text.chat.template import ChatPrompt
from unspool.text.thoughts.formats import Start
from unspool.text.thoughts.reader import AnswerReader, answer_reader
from unspool.text.tools.calls import Tool, ToolCallReader


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and whether one of them must be called; and where its answer has
    thoughts."""

    tools: tuple[Tool, ...] = ()
    choice: str = "auto"  # none, auto, required, or a tool's name behind "="
    allowed: tuple[str, ...] | None = None  # names of the tools that may be called; None: all
    parallel: bool | None = None  # whether there may be several calls; None: not said
    thinking: Thinking | None = None  # known once there is a prompt; None: there are no thoughts

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the model is told of: those that it may call."""
        if self.choice == "none":
            return ()
        return tuple(t for t in self.tools if self.allowed is None or t.name in self.allowed)

    @property
    def required(self) -> tuple[Tool, ...]:
        """The tools of which one must be called; none: no call is needed."""
        if self.choice == "required":
            return self.offered
        return tuple(tool for tool in self.tools if self.choice == f"={tool.name}")

    def check(self) -> None:
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise bad_request("two tools have the same name", "tools")
        if not self.tools and self.choice not in ("auto", "none"):
            raise bad_request("tool_choice asks for a tool, and there are no tools", "tool_choice")
        wanted = [self.choice[1:]] if self.choice.startswith("=") else self.allowed or ()
        for name in wanted:
            if name not in names:
                message = f"tool_choice names {name[:80]!r}, which is not among the tools"
                raise bad_request(message, "tool_choice")

    @property
    def is_plain(self) -> bool:
        """Whether an answer can only be words."""
        return not self.offered and self.thinking is None

    def reader(self, served: ServedModel, start: Start | None = None) -> AnswerReader | None:
        """What finds thoughts and calls in a text; None where it can only be words."""
        calls, thinking = self._call_reader(served), self.thinking
        if thinking is None:
            return calls
        return answer_reader(thinking.format, start or thinking.start, calls)

    def _call_reader(self, served: ServedModel) -> ToolCallReader | None:
        if not self.offered:
            return None
        # Where a call is bare JSON, an answer that happens to be JSON must not be taken for one.
        names = {tool.name for tool in self.offered} if served.tools.name == "llama3" else None
        required = bool(self.required)
        return ToolCallReader(served.tools, required=required, names=names, tools=self.offered)


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """What a request comes to."""

    ids: list[int]
    options: dict[str, Any]  # of `LanguageModel.stream`
    use: ToolUse


def check_chat(body: ChatRequest) -> None:
    """Refuse what contradicts itself."""
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    check_stream_options(body)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        message = "max_tokens and max_completion_tokens are the same; give one"
        raise bad_request(message, "max_tokens")


def prepare_chat(call: Call, body: ChatRequest, **more: Any) -> PreparedChat:
    """A conversation as ids, with all its options checked; `more` are options that `ChatRequest`
    has no field for. On a thread, since templates and tokenizing take their time."""
    call.apply_hints(body)
    options = sampling_options(call.served.lm, body, top=body.top_logprobs or 0, **more)
    use = tool_use(body)
    schema = _answer_schema(options, body)
    if streams_trace(body) and use.offered and "guard" in options:
        raise bad_request(
            "a guard may take text back, and a tool call that was streamed cannot be taken back; "
            "leave out stream, tools, unspool.trace or unspool.guard",
            "unspool.guard",
        )
    if body.prediction is not None:
        if options.get("speculate"):
            message = "prediction and unspool.speculate are two drafts; give one"
            raise bad_request(message, "prediction")
        options["speculate"] = prediction_drafter(call.served.lm, body.prediction.text)
    messages = [template_message(message) for message in body.messages]
    if len(messages) > call.served.lm.context:
        raise bad_request(
            f"{len(messages):,} messages are more than the model's context can hold",
            code="context_length_exceeded",
        )
    if messages[-1].get("tool_calls"):
        first = messages[-1]["tool_calls"][0]
        raise bad_request(f"the call {first['id'][:80]!r} has no result: give it behind the call")
    tools = [json.dumps(tool.as_openai()) for tool in use.offered]
    words = [*tools, *(message.get("content") or "" for message in messages)]
    call.check_text(*words, longer=body.is_endless)
    told = template_options(body)
    if body.thinking_budget is not None:
        options["think_budget"] = body.thinking_budget
    think = _think(call, body, options)
    _set_format(call, options, use, schema)
    ids = chat_prompt(call.served, messages, use, options, told, note=call.note, think=think).ids
    compile_schema(options, call.note)
    most = body.max_completion_tokens or body.max_tokens
    options["max_tokens"] = call.token_limit(most, len(ids))
    return PreparedChat(ids, options, replace(use, thinking=call.served.lm.thinking(ids)))


def _think(call: Call, body: ChatRequest, options: dict[str, Any]) -> bool | str | None:
    """Whether the model is to think, or how much; a model that cannot is asked in vain."""
    wanted: bool | str | None = body.reasoning_effort
    if body.reasoning is not None:
        asked = body.reasoning
        wanted = wanted or asked.effort or asked.enabled
        if asked.max_tokens is not None:
            options["think_budget"] = asked.max_tokens
    if call.served.lm.thought_format is not None:
        return wanted
    named = {"reasoning_effort": body.reasoning_effort, "reasoning": body.reasoning}
    for name in (name for name, value in named.items() if value is not None):
        ignore(call.request, name)
    if options.pop("think_budget", None) is not None:
        ignore(call.request, "thinking_budget")
    return None


def chat_prompt(
    served: ServedModel,
    messages: Sequence[dict[str, Any]],
    use: ToolUse,
    options: dict[str, Any],
    template: Mapping[str, Any] | None = None,
    note: Callable[..., None] = lambda *_: None,
    think: bool | str | None = None,
) -> ChatPrompt:
    """A conversation as ids. Puts into the options what the text must be, and where it stops;
    `template` goes to the chat template, which also hears whether to `think`."""
    use.check()
    lm = served.lm
    ready, tools = served.tools.prepared(list(messages), use.offered)
    told = lm.think_options(think, options)
    prompt = lm.chat_prompt(ready, tools=tools, **{**told, **(template or {})})
    options["stop"] = (*options.get("stop", ()), *lm.chat_template.stops)
    if use.required:
        check_one_grammar(options, "a required tool call")
        # A small model that may call several times rarely stops: only who asks for it gets it.
        several = use.parallel is True and use.choice == "required"
        closed = [_closed(tool, note) for tool in use.required]
        options["grammar"] = GrammarSpec.lark(served.tools.grammar(closed, parallel=several))
        if options.get("thoughts") and served.tools.syntax == "channels":
            options["thoughts"] = CALL
    return prompt


def _closed(tool: Tool, note: Callable[..., None]) -> Tool:
    """A tool whose arguments are as every schema is kept to here."""
    spec = GrammarSpec.json_schema(tool.parameters)
    note(*spec.notes)
    return replace(tool, parameters=json.loads(spec.source))


_OURS = ("messages", "tools", "add_generation_prompt", "continue_final_message")


def template_options(body: Any) -> dict[str, Any]:
    """What the model's template is told: as far as it knows such words."""
    found = dict(body.chat_template_kwargs or {})
    for name in _OURS:
        if name in found:
            message = f"chat_template_kwargs may not hold {name}; it has a place of its own"
            raise bad_request(message, "chat_template_kwargs")
    for name in _OURS[2:]:
        if getattr(body, name, None) is not None:
            found[name] = getattr(body, name)
    return found


def streams_trace(body: ChatRequest) -> bool:
    """Whether steps are sent as they come, those that a guard takes back later among them."""
    return bool(body.stream) and body.unspool is not None and body.unspool.trace


def template_message(message: Message) -> dict[str, Any]:
    """A message as templates know it."""
    given = message.model_dump(exclude_none=True)
    if given["role"] == "developer":
        given["role"] = "system"
    if isinstance(given.get("content"), list):
        given["content"] = join_parts(given["content"], "content")
    if given.get("content") is None and not given.get("tool_calls"):
        raise bad_request(f"a message of the {given['role']} has no content", "messages")
    for call in given.get("tool_calls") or []:
        call.pop("index", None)
    return given


def tool_call(identity: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in OpenAI's form."""
    function = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


def tools_of(given: Sequence[FunctionTool] | None) -> tuple[Tool, ...]:
    functions = [tool.function for tool in given or ()]
    return tuple(Tool(f.name, f.description or "", f.parameters or {}) for f in functions)


def tool_use(body: ChatRequest) -> ToolUse:
    choice, tools = body.tool_choice, tools_of(body.tools)
    if isinstance(choice, AllowedToolsChoice):
        names = tuple(tool.tool_name for tool in choice.choice.tools)
        return ToolUse(tools, choice.choice.mode, names, body.parallel_tool_calls)
    named = f"={choice.function.name}" if isinstance(choice, NamedTool) else choice or "auto"
    return ToolUse(tools, named, parallel=body.parallel_tool_calls)


def _answer_schema(options: dict[str, Any], body: ChatRequest) -> dict[str, Any] | None:
    """The JSON schema that `response_format` asks for; None: any text."""
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    check_one_grammar(options, "response_format")
    if wanted.type == "json_object":
        return wanted.schema_ or {}
    if wanted.json_schema is None:
        message = "response_format of type json_schema needs a schema"
        raise bad_request(message, "response_format")
    return wanted.json_schema.schema_ or {"type": "object"}


def _set_format(
    call: Call, options: dict[str, Any], use: ToolUse, schema: dict[str, Any] | None
) -> None:
    """Put the form that the answer must have into the options.

    It is the form of words. An answer that must be a call has none, and where a call is possible,
    the text is either a call or such words.
    """
    if schema is None or use.required:
        return
    if not use.offered or call.served.tools.syntax == "channels":
        options |= {"json_schema": schema} if schema else {"json": True}
        return
    spec = GrammarSpec.json_schema(schema) if schema else None
    call.note(*(() if spec is None else spec.notes))
    answer = '{"type": "object"}' if spec is None else spec.source
    tools = [_closed(tool, call.note) for tool in use.offered]
    calls = call.served.tools.grammar(tools, parallel=use.parallel is True)
    words = f"start: calls | words\nwords: %json {answer}\ncalls:"
    options["grammar"] = GrammarSpec.lark(calls.replace("start:", words, 1))
