"""Tools in a request: what the template is given, what the text must be, how calls are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unspool.sampling import GrammarSpec
from unspool.serve.core.options import check_one_grammar
from unspool.serve.core.registry import ServedModel
from unspool.serve.http.errors import bad_request
from unspool.text.chat.template import ChatPrompt
from unspool.text.tools.calls import Tool, ToolCallReader


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and whether one of them must be called."""

    tools: tuple[Tool, ...] = ()
    choice: str = "auto"  # none, auto, required, or a tool's name behind "="
    parallel: bool | None = None  # whether there may be several calls; None: not said

    @property
    def offered(self) -> tuple[Tool, ...]:
        return () if self.choice == "none" else self.tools

    @property
    def required(self) -> tuple[Tool, ...]:
        """The tools of which one must be called; none: no call is needed."""
        if self.choice == "required":
            return self.tools
        if self.choice.startswith("="):
            return tuple(tool for tool in self.tools if tool.name == self.choice[1:])
        return ()

    def check(self) -> None:
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise bad_request("two tools have the same name", "tools")
        if not self.tools and self.choice not in ("auto", "none"):
            raise bad_request("tool_choice asks for a tool, and there are no tools", "tool_choice")
        if self.choice.startswith("=") and not self.required:
            raise bad_request(
                f"tool_choice names {self.choice[1:][:80]!r}, which is not among the tools",
                "tool_choice",
            )

    def reader(self, served: ServedModel) -> ToolCallReader | None:
        """What finds the calls in a text; None where there can be none."""
        if not self.offered:
            return None
        # Where a call is bare JSON, an answer that happens to be JSON must not be taken for one.
        names = {tool.name for tool in self.offered} if served.tools.name == "llama3" else None
        return ToolCallReader(served.tools, required=bool(self.required), names=names)


def chat_prompt(
    served: ServedModel, messages: Sequence[dict[str, Any]], use: ToolUse, options: dict[str, Any]
) -> ChatPrompt:
    """A conversation as ids. Puts into the options what the text must be, and where it stops."""
    use.check()
    lm = served.lm
    ready, tools = served.tools.prepared(list(messages), use.offered)
    prompt = lm.chat_prompt(ready, tools=tools)
    options["stop"] = (*options.get("stop", ()), *lm.chat_template.stops)
    if use.required:
        check_one_grammar(options, "a required tool call")
        # A small model that may call several times rarely stops: only who asks for it gets it.
        several = use.parallel is True and use.choice == "required"
        wanted = served.tools.grammar(use.required, parallel=several)
        options["grammar"] = GrammarSpec.lark(wanted)
    return prompt
