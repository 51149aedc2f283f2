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

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from unspool.engine.generation import Generation
from unspool.engine.stream import StepStream
from unspool.request_options import strings
from unspool.session import Messages, Prompt, Session

if TYPE_CHECKING:
    from unspool.backends.step import Floats
    from unspool.decoding.samples import Extract, Vote
    from unspool.decoding.search import Expander, SearchTree
    from unspool.decoding.written import Ranking, Scorer
    from unspool.lens.attribution import Attribution
    from unspool.lens.logit_lens import LogitLens
    from unspool.lens.look import Look
    from unspool.lens.neighbours import Neighbour
    from unspool.lens.replay import Replay
    from unspool.lens.subject import Text
    from unspool.lens.trace import Trace


class LanguageModel(Session):
    """A model, ready to write; made by `unspool.load`."""

    # -- writing ----------------------------------------------------------------------------

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Continue a prompt; the options are those of `stream`."""
        generation, steps = self.begin(prompt, **options)
        for _ in generation.extend(steps):
            pass
        return generation

    def stream(self, prompt: Prompt, **options: Any) -> StepStream:
        """Continue a prompt, step by step.

        prompt       text, or token ids.
        max_tokens   how many tokens at the most (256).
        stop         strings that end the text, and are not part of it.
        seed         same seed, same text; without one it is different each time.
        sample       the number of the sample, when one seed is to give several texts.
        top          how many candidates each step tells (0).
        explain      whether each step tells how it was picked: rank, entropy, the draw, and what
                     each sampling stage did (False).
        end          False: go on when the model writes an end token.
        priority     higher goes first when many wait.
        cache        False: read the whole text again for every token, to see what the cache saves.
        json, json_schema, regex, choice, grammar
                     what the text must be: any JSON object, JSON of a schema, a match of a
                     regular expression, one of several texts, a Lark or GBNF grammar.
        guard        what to watch for, such as "loop" or "ban=word|another": words, or a
                     GuardPolicy; by default the text is rewound and written differently.
        speculate    "lookup", or another drafter: guess ahead, and check many tokens at once.
        ...          temperature, top_k, top_p and the rest of `SamplingSettings`.
        """
        _, steps = self.begin(prompt, **options)
        return steps

    def chat(self, messages: Messages, **options: Any) -> Generation:
        """Answer a conversation (or a single message) by the model's chat template.

        A conversation whose last message is the assistant's is continued where it stops.
        Options are those of `stream`, and `tools`.
        """
        prompt = self.chat_prompt(messages, tools=options.pop("tools", None))
        stops = strings(options.pop("stop", None)) + self.chat_template.stops
        return self.generate(prompt.ids, stop=stops, **options)

    # -- several texts for one prompt --------------------------------------------------------

    def samples(self, prompt: Prompt, n: int, **options: Any) -> list[Generation]:
        """`n` texts for one prompt, written in one batch; options as in `stream`."""
        from unspool.decoding.samples import samples

        return samples(self, prompt, n, **options)

    def best_of(
        self, prompt: Prompt, n: int, *, scorer: Scorer | None = None, **options: Any
    ) -> Ranking:
        """`n` samples, the best first: by mean log-probability, or by a scorer (higher is better).

        Options as in `stream`.
        """
        from unspool.decoding.samples import best_of

        return best_of(self, prompt, n, scorer=scorer, **options)

    def vote(self, prompt: Prompt, n: int, *, extract: Extract, **options: Any) -> Vote:
        """What most of `n` samples answer (self-consistency); options as in `stream`.

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

    def contrastive(
        self,
        prompt: Prompt,
        *,
        k: int = 4,
        alpha: float = 0.6,
        max_tokens: int = 256,
        stop: str | Sequence[str] = (),
        end: bool = True,
        top: int = 5,
    ) -> Generation:
        """Contrastive search: likely, and unlike what stands there already.

        Of the `k` likeliest tokens the one is taken that is best by probability less `alpha` times
        its likeness to any token before; `alpha` 0 or `k` 1 is greedy.
        """
        from unspool.decoding.contrastive import contrastive_search

        return contrastive_search(
            self, prompt, k=k, alpha=alpha, max_tokens=max_tokens, stop=stop, end=end, top=top
        )

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
        **options: Any,
    ) -> SearchTree:
        """Tree search: continue in several ways, score, keep the best, and again.

        width     into how many continuations each kept text is sampled,
        tokens    of how many tokens each.
        keep      how many of a level's texts are continued; the others are pruned.
        depth     how many levels.
        scorer    judges the text up to a node (a `Generation`), higher is better; without one, the
                  mean log-probability of its tokens does.
        expand    proposes the continuations in place of `width` samples.

        The rest as in `stream`.
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
        token: int | None = None,
        whole: bool = False,
    ) -> LogitLens:
        """What each layer would have said comes next, had it been the last.

        text     a text and the position in it, or what `look` gave.
        token    the one to follow: by default the one that was picked, or, at the end of a text,
                 the likeliest.
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
        token: int | None = None,
        against: int | Literal["mean"] | None = None,
    ) -> Attribution:
        """Which parts of the model pushed a token, and which held it back.

        text      a text and the position in it, or what `look` gave.
        token     by default the one that was picked, or, at the end of a text, the likeliest.
        against   attribute the lead over another token, or over the mean of all logits.
        """
        from unspool.lens.attribution import attribution

        return attribution(self, self._seen(text, position), token=token, against=against)

    def neighbours(self, token: int | str, count: int = 10) -> tuple[Neighbour, ...]:
        """The tokens whose embeddings point most nearly the same way, nearest first.

        A text must be a single token (most words are one with a space before them).
        """
        from unspool.lens.neighbours import neighbours

        return neighbours(self, token, count)

    def embed(self, text: Text) -> Floats:
        """A text as one vector of length one: the mean of its tokens' final vectors."""
        from unspool.lens.embedding import embedding

        return embedding(self, text)

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
