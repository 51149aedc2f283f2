"""An MCP server: a model's tools for clients of the Model Context Protocol.

    unspool mcp                      # over standard input and output, for a desktop client
    unspool mcp --http --port 8001   # streamable HTTP, at /mcp

Every text that a tool writes is a branch with an id. `continue_branch` rewinds it, puts another
token in, and resumes; `look` shows the candidates and the attention at one of its tokens. Needs the
`mcp` package (`pip install 'unspool[mcp]'`).
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any, ParamSpec, TypeVar

import anyio.to_thread
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

from unspool import __version__
from unspool.engine.generation import Generation
from unspool.engine.results import Candidate
from unspool.errors import SettingsError, UnspoolError
from unspool.lm import LanguageModel

_MAX_BRANCHES = 256  # older ones are forgotten
_MAX_ATTENDED = 8  # tokens with the most attention in `look`

_INSTRUCTIONS = """A language model whose every step can be inspected.
`generate` continues a text, `chat` answers. Both return a branch id and the tokens of the text with
their log-probabilities. `look` shows what else the model considered at a token; `continue_branch`
rewinds a branch to a token, puts another one there, and writes on. `score` gives the
log-probability of each token of a text, `tokenize` its token ids."""

MaxTokens = Annotated[int, Field(ge=1, le=1 << 20, description="Maximum number of new tokens.")]
Temperature = Annotated[
    float | None, Field(ge=0, description="0 always takes the most likely token. Default: 0.8.")
]
Seed = Annotated[
    int | None, Field(ge=0, description="The same seed writes the same text. Default: random.")
]
Stop = Annotated[list[str] | None, Field(description="Strings that end the text.")]
Top = Annotated[int, Field(ge=0, le=50, description="Number of candidates at each token.")]
Branch = Annotated[str, Field(description="Id of a branch, from an earlier result.")]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class BranchStore:
    """The texts that were written, by id; the oldest are forgotten. Thread-safe."""

    def __init__(self, capacity: int = _MAX_BRANCHES) -> None:
        self._capacity, self._lock, self._count = capacity, threading.Lock(), 0
        self._texts: OrderedDict[str, Generation] = OrderedDict()

    def add(self, text: Generation) -> str:
        """Keep a text and return its id."""
        with self._lock:
            self._count += 1
            name = f"b{self._count}"
            self._texts[name] = text
            if len(self._texts) > self._capacity:
                self._texts.popitem(last=False)
            return name

    def get(self, name: str) -> Generation:
        """Return a text by its id."""
        with self._lock:
            if name not in self._texts:
                names = ", ".join(list(self._texts)[-8:]) or "none yet"
                raise SettingsError(f"no such branch: {name!r}; the latest are: {names}")
            self._texts.move_to_end(name)
            return self._texts[name]


@contextmanager
def _as_tool_errors() -> Iterator[None]:
    """Report errors of the caller as such: their message is for the model that called."""
    try:
        yield
    except UnspoolError as error:
        raise ToolError(str(error)) from error


def _tool(
    function: Callable[Parameters, Awaitable[Result]],
) -> Callable[Parameters, Awaitable[Result]]:
    @wraps(function)
    async def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with _as_tool_errors():
            return await function(*args, **kwargs)

    return call


def build_server(lm: LanguageModel, name: str = "unspool") -> MCPServer:
    """Build the MCP server of a model.

    Args:
        lm: The model that its tools use.
        name: Name of the server, which clients show.

    Returns:
        A server with the tools generate, chat, score, tokenize, continue_branch and look. Start it
        with `server.run()`, or connect a client in this process: `mcp.Client(server)`.
    """
    server = MCPServer(name, instructions=_INSTRUCTIONS, version=__version__, log_level="WARNING")
    branches = BranchStore()

    def describe(text: Generation) -> dict[str, Any]:
        return {
            "branch": branches.add(text),
            "text": text.answer,
            **({"reasoning": text.reasoning} if text.reasoning else {}),
            "finish_reason": text.finish_reason,
            "seed": text.seed,
            "logprob": _finite(text.logprob),
            "tokens": [
                {"token": step.token, "text": step.piece, "logprob": _finite(step.logprob)}
                | ({"candidates": _candidates(step.candidates)} if step.candidates else {})
                for step in text.steps
            ],
        }

    @_tool
    async def generate(
        prompt: str,
        max_tokens: MaxTokens = 128,
        temperature: Temperature = None,
        seed: Seed = None,
        stop: Stop = None,
        top: Top = 0,
    ) -> dict[str, Any]:
        """Continue a text. Returns the new text, its tokens with log-probabilities, and a branch
        id for `look` and `continue_branch`."""
        options = _options(max_tokens, temperature, seed, stop, top)
        return describe(await lm.agenerate(prompt, **options))

    @_tool
    async def chat(
        message: str,
        system: Annotated[str | None, Field(description="System message.")] = None,
        max_tokens: MaxTokens = 256,
        temperature: Temperature = None,
        seed: Seed = None,
        top: Top = 0,
    ) -> dict[str, Any]:
        """Answer a message with the model's chat template. Returns the same fields as
        `generate`."""
        options = _options(max_tokens, temperature, seed, None, top)
        return describe(await lm.achat(message, system=system, **options))

    @_tool
    async def continue_branch(
        branch: Branch,
        at: Annotated[
            int | None,
            Field(description="Keep this many new tokens and drop the others. Default: all."),
        ] = None,
        token: Annotated[
            str | int | None,
            Field(description="Text or token id to put there, instead of the dropped token."),
        ] = None,
        max_tokens: Annotated[
            int | None,
            Field(ge=1, description="Maximum number of new tokens. Default: as before."),
        ] = None,
    ) -> dict[str, Any]:
        """Rewind a branch, put another token there, and resume. The old branch stays; the result
        is a new one. What both share is not computed again."""
        text = branches.get(branch)
        if at is not None:
            text = text.rewind(at)
        if token is not None:
            text = await anyio.to_thread.run_sync(text.choose, token)
        options: Any = {} if max_tokens is None else {"max_tokens": max_tokens}
        continued, steps = await anyio.to_thread.run_sync(lambda: text.start_resume(**options))
        await continued.extend_async(steps)
        return {**describe(continued), "reused_tokens": continued.reused}

    def score(
        text: str,
        top: Top = 0,
    ) -> dict[str, Any]:
        """Return the log-probability of each token of a text given those before it, their sum and
        the perplexity."""
        with _as_tool_errors():
            result = lm.score(text, top=top)
            return {
                "logprob": _finite(result.total),
                "perplexity": _finite(result.perplexity),
                "tokens": [
                    {
                        "token": position.token,
                        "text": position.text,
                        "logprob": position.logprob and _finite(position.logprob),
                        "rank": position.rank,
                    }
                    | ({"candidates": _candidates(position.candidates)} if top else {})
                    for position in result.positions
                ],
            }

    def tokenize(text: str) -> dict[str, Any]:
        """Split a text into the model's tokens. Returns ids and pieces."""
        with _as_tool_errors():
            ids = lm.tokenizer.encode(text)
            return {"tokens": ids, "pieces": lm.readable_all(ids), "count": len(ids)}

    def look(
        branch: Branch,
        index: Annotated[int, Field(description="Number of the new token in the branch, from 0.")],
        top: Annotated[int, Field(ge=1, le=50, description="Number of candidates.")] = 10,
    ) -> dict[str, Any]:
        """Look inside the model at one token of a branch: the candidates, which earlier tokens it
        attended to (mean over layers and heads), and from which layer on the logit lens predicts
        the token that was written."""
        with _as_tool_errors():
            return look_at(lm, branches.get(branch), index, top)

    for tool in (generate, chat, continue_branch, score, tokenize, look):
        server.add_tool(tool)
    return server


def look_at(lm: LanguageModel, text: Generation, index: int, top: int) -> dict[str, Any]:
    """Return candidates, attention and logit lens at one new token of a text, for JSON."""
    if not 0 <= index < len(text.steps):
        raise SettingsError(
            f"index must be from 0 to {len(text.steps) - 1}, the tokens of the branch, got {index}"
        )
    step = text.steps[index]
    inside = lm.look(text, len(text.prompt) + index - 1)  # the token before predicts this one
    lens = lm.logit_lens(inside, token=step.token, top=1)
    attention = inside.attention_mean
    strongest = sorted(range(len(attention)), key=lambda at: -attention[at])[:_MAX_ATTENDED]
    is_first = [layer.rank == 0 for layer in lens.layers]
    settled = next((n for n in range(len(is_first)) if all(is_first[n:])), None)
    return {
        "token": step.token,
        "text": step.piece,
        "logprob": _finite(step.logprob),
        "candidates": _candidates(text.alternatives(index, top)),
        "attention": [
            {"position": at, "text": inside.texts[at], "weight": round(float(attention[at]), 4)}
            for at in strongest
        ],
        "logit_lens": [
            {
                "layer": layer.layer,
                "predicts": layer.candidates[0].text,
                "probability": round(layer.probability, 6),
                "rank": layer.rank,
            }
            for layer in lens.layers
        ],
        "predicted_from_layer": settled,  # None: another token is the most likely at the end
    }


def _options(
    max_tokens: int, temperature: float | None, seed: int | None, stop: list[str] | None, top: int
) -> Any:
    options: dict[str, Any] = {"max_tokens": max_tokens, "top": top}
    named = {"temperature": temperature, "seed": seed, "stop": stop}
    return options | {name: value for name, value in named.items() if value is not None}


def _candidates(candidates: tuple[Candidate, ...]) -> list[dict[str, Any]]:
    return [
        {"token": c.token, "text": c.text, "probability": round(math.exp(c.logprob), 6)}
        for c in candidates
    ]


def _finite(value: float) -> float | None:
    """A number for JSON, which has neither infinity nor nan."""
    return value if math.isfinite(value) else None
