"""The face of a model: everything one can ask of it, as methods.

lm = unspool.load()                                   # the default model, a path or a repo id
print(lm.generate("Once upon a time", temperature=0.7, seed=7))
for step in lm.stream("Once upon a time"):
    print(step.text, end="", flush=True)
print(lm.chat("Why do leaves change color in fall?"))
print(lm.score("The cat sat on the mat").perplexity)

The work is done elsewhere: texts in the session's engine, strategies in `decoding/`, looking inside
in `lens/`. Those are imported when they are first used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast, overload

from unspool.beyond import BeyondLeftToRight, Prompts
from unspool.engine.generation import Generation, Generations
from unspool.engine.options import Options, tells_options
from unspool.engine.stream import StepStream
from unspool.errors import SettingsError
from unspool.request_options import is_conversation, several, strings
from unspool.session import Messages, Prompt

if TYPE_CHECKING:
    from unspool.backends.step import Floats
    from unspool.decoding.samples import Vote
    from unspool.decoding.search import Expander
    from unspool.decoding.search_tree import SearchTree
    from unspool.decoding.voting import Extract
    from unspool.decoding.written import Ranking, Scorer
    from unspool.lens.attribution import Attribution
    from unspool.lens.logit_lens import LogitLens
    from unspool.lens.look import Look
    from unspool.lens.neighbours import Neighbour
    from unspool.lens.replay import Replay
    from unspool.lens.subject import Text
    from unspool.lens.trace import Trace

Conversations = list[str] | tuple[str, ...] | Sequence[Sequence[Mapping[str, Any]]]
Tools = Sequence[Mapping[str, Any]]
Think = bool | str | None


class LanguageModel(BeyondLeftToRight):
    """A model, ready to write; made by `unspool.load`."""

    # -- writing ----------------------------------------------------------------------------

    @overload
    def generate(
        self, prompt: Prompt, *, progress: bool = True, **options: Unpack[Options]
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Prompts, *, progress: bool = True, **options: Unpack[Options]
    ) -> Generations: ...

    @tells_options
    def generate(
        self, prompt: Prompt | Prompts, *, progress: bool = True, **options: Unpack[Options]
    ) -> Generation | Generations:
        """Continue a prompt: text or token ids. A list of prompts is written as one batch.

        The answers come in the order of the prompts, each the same text as alone; what takes more
        than a second shows a bar, unless `progress` is False. If some of many texts go wrong, the
        others are written all the same, and a `BatchError` holds them.
        """
        if texts := several(prompt):
            from unspool.decoding.together import generate_all

            return generate_all(self, texts, dict(options), progress=progress)
        generation, steps = self.begin(cast(Prompt, prompt), **options)
        for _ in generation.extend(steps):
            pass
        return generation

    @overload
    async def agenerate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation: ...

    @overload
    async def agenerate(self, prompt: Prompts, **options: Unpack[Options]) -> Generations: ...

    @tells_options
    async def agenerate(
        self, prompt: Prompt | Prompts, **options: Unpack[Options]
    ) -> Generation | Generations:
        """`generate` for programs with an event loop: `text = await lm.agenerate(prompt)`.

        The event loop is never blocked, and requests that run at the same time share batches.
        Cancelling the task cancels the request.
        """
        from asyncio import to_thread

        from unspool.decoding.together import generate_all_async, write_async

        if texts := several(prompt):
            return await generate_all_async(self, texts, dict(options))
        text = await to_thread(self.draft, cast(Prompt, prompt), **options)
        await write_async(self, text)
        return text

    @tells_options
    def stream(
        self,
        prompt: Prompt | Messages,
        *,
        system: str | None = None,
        tools: Tools | None = None,
        think: Think = None,
        **options: Unpack[Options],
    ) -> StepStream:
        """Continue a prompt, step by step: iterate over it, also with `async for`.

        A list of messages is answered by the chat template, as `chat` does; so is a text with
        `system`, `tools` or `think`. Leaving the loop in any way cancels the request.
        """
        is_chat = any(value is not None for value in (system, tools, think))
        if is_chat or is_conversation(prompt):
            prompt = self._chat_prompts(cast(Messages, prompt), system, tools, think, options)
        _, steps = self.begin(cast(Prompt, prompt), **options)
        return steps

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        system: str | None = None,
        tools: Tools | None = None,
        think: Think = None,
        progress: bool = True,
        **options: Unpack[Options],
    ) -> Generation: ...

    @overload
    def chat(
        self,
        messages: Conversations,
        *,
        system: str | None = None,
        tools: Tools | None = None,
        think: Think = None,
        progress: bool = True,
        **options: Unpack[Options],
    ) -> Generations: ...

    @tells_options
    def chat(
        self,
        messages: Messages | Conversations,
        *,
        system: str | None = None,
        tools: Tools | None = None,
        think: Think = None,
        progress: bool = True,
        **options: Unpack[Options],
    ) -> Generation | Generations:
        """Answer a conversation (or a single message) by the model's chat template.

        A conversation is a list of messages, {"role": ..., "content": ...}; one whose last message
        is the assistant's is continued where it stops. A list of questions, or of conversations, is
        answered as one batch, in their order (see `generate`). `system` is the system message of
        each. `tools` are functions that the model may call, as JSON schemas. `think` says whether a
        model that can is to think first, or with how much effort ("low", "high"); its thoughts are
        in `reasoning`, not in `answer`.
        """
        prompts = self._chat_prompts(messages, system, tools, think, options)
        texts: Generation | Generations = self.generate(prompts, progress=progress, **options)
        return texts

    @overload
    async def achat(
        self,
        messages: Messages,
        *,
        system: str | None = None,
        tools: Tools | None = None,
        think: Think = None,
        **options: Unpack[Options],
    ) -> Generation: ...

    @overload
    async def achat(
        self,
        messages: Conversations,
        *,
        system: str | None = None,
        tools: Tools | None = None,
        think: Think = None,
        **options: Unpack[Options],
    ) -> Generations: ...

    @tells_options
    async def achat(
        self,
        messages: Messages | Conversations,
        *,
        system: str | None = None,
        tools: Tools | None = None,
        think: Think = None,
        **options: Unpack[Options],
    ) -> Generation | Generations:
        """`chat` for programs with an event loop; see `agenerate`."""
        from asyncio import to_thread

        prompts = await to_thread(self._chat_prompts, messages, system, tools, think, options)
        texts: Generation | Generations = await self.agenerate(prompts, **options)
        return texts

    def _chat_prompts(
        self,
        messages: Messages | Conversations,
        system: str | None,
        tools: Tools | None,
        think: Think,
        options: Options,
    ) -> Any:
        """The token ids of a conversation, or a list of them for several conversations.

        Adds to `options` what a chat needs: the template's stop strings, and where thoughts are.
        """
        if tools is not None and not all(isinstance(tool, Mapping) for tool in _listed(tools)):
            raise SettingsError(f"tools must be a list of JSON schemas (dicts), got {tools!r}")
        options["stop"] = strings(options.get("stop")) + self.chat_template.stops
        template_options = self.think_options(think, options)

        def encode(conversation: Any) -> list[int]:
            return self.chat_prompt(
                conversation, system=system, tools=tools, **template_options
            ).ids

        conversations = several(messages)
        return list(map(encode, conversations)) if conversations else encode(messages)

    # -- several texts for one prompt --------------------------------------------------------

    @tells_options
    def samples(self, prompt: Prompt, n: int, **options: Unpack[Options]) -> Generations:
        """`n` texts for one prompt, written in one batch."""
        from unspool.decoding.samples import samples

        return samples(self, prompt, n, **options)

    @tells_options
    def best_of(
        self, prompt: Prompt, n: int, *, scorer: Scorer | None = None, **options: Unpack[Options]
    ) -> Ranking:
        """`n` samples, the best first: by mean log-probability, or by a scorer's higher number."""
        from unspool.decoding.samples import best_of

        return best_of(self, prompt, n, scorer=scorer, **options)

    @tells_options
    def vote(self, prompt: Prompt, n: int, *, extract: Extract, **options: Unpack[Options]) -> Vote:
        """What most of `n` samples answer (self-consistency).

        `extract` finds a text's answer: a pattern, whose last match counts (its first group, if it
        has groups), or a function of the `Generation` that gives None where there is no answer.
        """
        from unspool.decoding.samples import vote

        return vote(self, prompt, n, extract=extract, **options)

    def beam(
        self,
        prompt: Prompt,
        *,
        beams: int = 4,
        groups: int = 1,
        diversity_penalty: float = 0.5,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        results: int = 1,
        max_tokens: int = 256,
        stop: str | Sequence[str] = (),
        end: bool = True,
        top: int = 5,
    ) -> Ranking:
        """Beam search: the likeliest whole texts, best first.

        beams            how many texts grow side by side.
        groups           into how many groups they are divided; `diversity_penalty` keeps these
                         apart.
        length_penalty   above 0 favours longer texts, below 0 shorter ones.
        early_stopping   True: stop once as many texts have ended as there are beams. False: go on
                         while a running one scores better as it is. "never": while it could at all.
        results          how many texts to give, at most `beams`.
        """
        from unspool.decoding.beam import beam_search

        return beam_search(
            self,
            prompt,
            beams=beams,
            groups=groups,
            diversity_penalty=diversity_penalty,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            results=results,
            max_tokens=max_tokens,
            stop=stop,
            end=end,
            top=top,
        )

    @tells_options
    def search(
        self,
        prompt: Prompt,
        *,
        width: int = 4,
        tokens: int = 16,
        keep: int = 2,
        depth: int = 4,
        scorer: Scorer | None = None,
        expand: Expander | None = None,
        **options: Unpack[Options],
    ) -> SearchTree:
        """Tree search: continue in several ways, score, keep the best, and again.

        width     into how many continuations each kept text is sampled,
        tokens    of how many tokens each.
        keep      how many of a level's texts are continued; the others are pruned.
        depth     how many levels.
        scorer    judges the text up to a node (a `Generation`), higher is better; without one, the
                  mean log-probability of its tokens does.
        expand    proposes the continuations in place of `width` samples.
        """
        from unspool.decoding.search import tree_search

        return tree_search(
            self,
            prompt,
            width=width,
            tokens=tokens,
            keep=keep,
            depth=depth,
            scorer=scorer,
            expand=expand,
            **options,
        )

    # -- looking inside -----------------------------------------------------------------------

    def look(self, text: Text, position: int = -1) -> Look:
        """Attention and residuals at one position of a text; a negative one counts from the end.

        A position is that of the token being read: what the model then says is about the token
        after it.
        """
        from unspool.lens.look import look

        return look(self, text, position)

    def logit_lens(
        self,
        text: Text | Look,
        position: int = -1,
        *,
        top: int = 5,
        token: int | str | None = None,
        whole: bool = False,
    ) -> LogitLens:
        """What each layer would have said comes next, had it been the last.

        text     a text and the position in it, or what `look` gave.
        token    the one to follow, an id or text that is one token: by default the one that was
                 picked, or, at the end of a text, the likeliest.
        top      how many candidates of each layer are told.
        whole    also give every layer's log-probabilities over the whole vocabulary.
        """
        from unspool.lens.logit_lens import logit_lens

        return logit_lens(self, self._seen(text, position), top=top, token=token, whole=whole)

    def attribution(
        self,
        text: Text | Look,
        position: int = -1,
        *,
        token: int | str | None = None,
        against: int | str | None = None,
    ) -> Attribution:
        """Which parts of the model pushed a token, and which held it back.

        text      a text and the position in it, or what `look` gave.
        token     an id, or text that is one token (" Paris"); by default the one that was picked,
                  or, at the end of a text, the likeliest.
        against   attribute the lead over another token, or over the mean of all logits ("mean").
        """
        from unspool.lens.attribution import attribution

        return attribution(self, self._seen(text, position), token=token, against=against)

    def neighbours(self, token: int | str, count: int = 10) -> tuple[Neighbour, ...]:
        """The tokens whose embeddings point most nearly the same way, nearest first.

        A text must be a single token (most words are one with a space before them).
        """
        from unspool.lens.neighbours import neighbours

        return neighbours(self, token, count)

    def embed(self, text: Text | Prompts | Sequence[Generation]) -> Floats:
        """A text as a vector of length one, [width]: the mean of its tokens' final vectors.

        A list of texts gives one row for each: [texts, width].
        """
        from unspool.lens.embedding import embedding, embeddings

        if texts := several(text):
            return embeddings(self, texts)
        return embedding(self, cast("Text", text))

    def _seen(self, text: Text | Look, position: int) -> Look:
        from unspool.lens.look import Look

        return text if isinstance(text, Look) else self.look(text, position)

    # -- keeping texts, and writing them again ---------------------------------------------------

    def trace(self, generation: Generation) -> Trace:
        """Everything that led to a text; `explain=True` and `top` give it the detail."""
        from unspool.lens.trace import trace_of

        return trace_of(self, generation)

    def save_trace(self, generation: Generation, path: str | Path) -> None:
        """Write everything that led to a text to a file (JSON), for `replay`."""
        from unspool.lens.trace_file import save_trace

        save_trace(self.trace(generation), path)

    def replay(self, trace: Trace | str | Path, *, tolerance: float | None = None) -> Replay:
        """Write a saved text again, and say where it first differs.

        trace       what `trace` gave, or the file that `save_trace` wrote.
        tolerance   how far apart log-probabilities may be and still count as the same; by default
                    1e-3, and 0.1 where weights are in 16 bits.
        """
        from unspool.lens.replay import replay
        from unspool.lens.trace_file import load_trace

        found = load_trace(trace) if isinstance(trace, str | Path) else trace
        return replay(self, found, tolerance=tolerance)


def _listed(tools: Any) -> Sequence[Any]:
    """The items of a list; anything else as the one item of a list."""
    return tools if isinstance(tools, Sequence) and not isinstance(tools, str) else [tools]
