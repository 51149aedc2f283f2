"""The public API of a model: `LanguageModel`.

lm = unspool.load()                                   # the default model, a path or a repo id
print(lm.generate("Once upon a time", temperature=0.7, seed=7))
for step in lm.stream("Once upon a time"):
    print(step.text, end="", flush=True)
print(lm.chat("Why do leaves change color in fall?"))
print(lm.score("The cat sat on the mat").perplexity)

lm.fill("The ", unspool.gap, " sat on the mat").text
lm.edit("The cat sat at the mat.").changes
lm.diffuse("Once upon a time", max_tokens=64).text
lm.think("What is 17 * 24?", policy="vote", budget=2000).text
lm.futures("The sky is", mass=0.01).leaves

The session's engine generates; `decoding/` has infill, editing, diffusion and search; `lens/` looks
inside. These are imported when they are first used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast, overload

from unspool.engine.generation import Generation, Generations
from unspool.engine.request import Options, document_options
from unspool.engine.request_builder import as_strings, is_conversation, split_batch
from unspool.engine.results import StepStream
from unspool.engine.tree import Branch
from unspool.errors import SettingsError, UnspoolError
from unspool.session import Messages, Prompt, Session

if TYPE_CHECKING:
    from unspool.backends.interventions import Intervention
    from unspool.backends.step import Floats
    from unspool.decoding.branches import Ranking, Scorer
    from unspool.decoding.diffusion.diffuse import DiffusionStream
    from unspool.decoding.diffusion.options import DiffusionOptions
    from unspool.decoding.diffusion.result import Diffusion, Diffusions
    from unspool.decoding.edit.edit import Edit
    from unspool.decoding.infill.masked import MaskedModel
    from unspool.decoding.infill.result import Filling, Gap
    from unspool.decoding.search.futures import Futures
    from unspool.decoding.search.samples import Expander, Vote
    from unspool.decoding.search.think import Policy, ThoughtStream, VerifierLike
    from unspool.decoding.search.tree import SearchTree, Thought
    from unspool.decoding.search.verifiers import Extract
    from unspool.engine.canvas import Canvas
    from unspool.lens.activation_cache import ActivationCache, Layers, Names, Positions
    from unspool.lens.activation_files import SavedActivations
    from unspool.lens.activations import Activations, TextLike
    from unspool.lens.affine_lens import AffineLens, LensKind
    from unspool.lens.attribution import Attribution
    from unspool.lens.embeddings import Neighbour
    from unspool.lens.gradients import TokenAttribution
    from unspool.lens.logit_lens import LogitLens
    from unspool.lens.patching import Axis, Sweep
    from unspool.lens.replay import Replay
    from unspool.lens.sae import FeatureExample, SparseAutoencoder, TokenFeatures
    from unspool.lens.steering import Steer, SteeringVector
    from unspool.lens.trace import Trace

Prompts = list[str] | tuple[str, ...] | Sequence[Sequence[int]] | list[Prompt]
Conversations = list[str] | tuple[str, ...] | Sequence[Sequence[Mapping[str, Any]]]
Tools = Sequence[Mapping[str, Any]]
Think = bool | str | None


class LanguageModel(Session):
    """A model, ready to write; made by `unspool.load`."""

    # -- generation -------------------------------------------------------------------------

    @overload
    def generate(
        self, prompt: Prompt, *, progress: bool = True, **options: Unpack[Options]
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Prompts, *, progress: bool = True, **options: Unpack[Options]
    ) -> Generations: ...

    @document_options
    def generate(
        self, prompt: Prompt | Prompts, *, progress: bool = True, **options: Unpack[Options]
    ) -> Generation | Generations:
        """Continue a prompt: text or token ids. A list of prompts is generated as one batch.

        Results are in the order of the prompts, and each is the same text as alone. Work of more
        than a second shows a progress bar, unless `progress` is False. If some texts of a batch
        fail, a `BatchError` holds the others.
        """
        if texts := split_batch(prompt):
            from unspool.decoding.batch import generate_all

            return generate_all(self, texts, dict(options), progress=progress)
        generation, steps = self.begin(cast(Prompt, prompt), **options)
        for _ in generation.extend(steps):
            pass
        return generation

    @overload
    async def agenerate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation: ...

    @overload
    async def agenerate(self, prompt: Prompts, **options: Unpack[Options]) -> Generations: ...

    @document_options
    async def agenerate(
        self, prompt: Prompt | Prompts, **options: Unpack[Options]
    ) -> Generation | Generations:
        """Asynchronous `generate`: `text = await lm.agenerate(prompt)`.

        The event loop is never blocked, and concurrent requests share batches. Cancelling the task
        cancels the request.
        """
        from asyncio import to_thread

        from unspool.decoding.batch import generate_all_async, run_async

        if texts := split_batch(prompt):
            return await generate_all_async(self, texts, dict(options))
        text = await to_thread(self.prepare_generation, cast(Prompt, prompt), **options)
        await run_async(self, text)
        return text

    @document_options
    def stream(
        self,
        prompt: Prompt | Messages,
        *,
        system: str | None = None,
        tools: Tools | None = None,
        think: Think = None,
        **options: Unpack[Options],
    ) -> StepStream:
        """Continue a prompt, step by step: iterate over the result, also with `async for`.

        A list of messages is formatted by the chat template, as in `chat`; so is a text with
        `system`, `tools` or `think`. Leaving the loop cancels the request.
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

    @document_options
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
        """Answer a conversation (or a single message) with the model's chat template.

        A list of questions, or of conversations, is answered as one batch (see `generate`).

        Args:
            messages: A question, or a list of {"role": ..., "content": ...}. If the last message is
                the assistant's, it is continued.
            system: The system message of each conversation.
            tools: Functions that the model may call, as JSON schemas.
            think: Whether a reasoning model reasons first, or its effort ("low", "high"). The
                reasoning is in `reasoning`, not in `answer`.
            progress: Show a progress bar.
            options: As in `generate`.
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

    @document_options
    async def achat(
        self,
        messages: Messages | Conversations,
        *,
        system: str | None = None,
        tools: Tools | None = None,
        think: Think = None,
        **options: Unpack[Options],
    ) -> Generation | Generations:
        """Asynchronous `chat`; see `agenerate`."""
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
        """Return the token ids of a conversation, or a list of them for several conversations.

        Adds the template's stop strings and reasoning format to `options`.
        """
        if tools is not None and not all(isinstance(tool, Mapping) for tool in _as_list(tools)):
            raise SettingsError(f"tools must be a list of JSON schemas (dicts), got {tools!r}")
        options["stop"] = as_strings(options.get("stop")) + self.chat_template.stops
        template_options = self.think_options(think, options)

        def encode(conversation: Any) -> list[int]:
            return self.chat_prompt(
                conversation, system=system, tools=tools, **template_options
            ).ids

        conversations = split_batch(messages)
        return list(map(encode, conversations)) if conversations else encode(messages)

    # -- several texts for one prompt --------------------------------------------------------

    @document_options
    def samples(self, prompt: Prompt, n: int, **options: Unpack[Options]) -> Generations:
        """Generate `n` texts for one prompt, in one batch."""
        from unspool.decoding.search.samples import samples

        return samples(self, prompt, n, **options)

    @document_options
    def best_of(
        self, prompt: Prompt, n: int, *, scorer: Scorer | None = None, **options: Unpack[Options]
    ) -> Ranking:
        """Generate `n` samples and rank them by mean log-probability, or by a scorer."""
        from unspool.decoding.search.samples import best_of

        return best_of(self, prompt, n, scorer=scorer, **options)

    @document_options
    def vote(self, prompt: Prompt, n: int, *, extract: Extract, **options: Unpack[Options]) -> Vote:
        """Return the most frequent answer of `n` samples (self-consistency, majority voting).

        `extract` finds a text's answer: a pattern, whose last match counts (its first group, if it
        has groups), or a function of the `Generation` that returns None if there is no answer.
        """
        from unspool.decoding.search.samples import vote

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
        """Beam search: the most likely texts, best first.

        beams            number of beams.
        groups           number of groups (diverse beam search), kept apart by `diversity_penalty`.
        length_penalty   above 0 favours longer texts, below 0 shorter ones.
        early_stopping   True: stop when as many texts have ended as there are beams. False: also
                         require that no running beam scores better. "never": that none can.
        results          how many texts to return, at most `beams`.
        """
        from unspool.decoding.search.beam import beam_search

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

    @document_options
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
        """Tree search: sample several continuations, score them, keep the best, repeat.

        width     number of continuations of each kept text.
        tokens    number of tokens of each continuation.
        keep      how many texts of a level are continued; the others are pruned.
        depth     number of levels.
        scorer    scores the text up to a node (a `Generation`), higher is better; by default the
                  mean log-probability of its tokens.
        expand    proposes the continuations, instead of `width` samples.
        """
        from unspool.decoding.search.samples import tree_search

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

    @document_options
    def futures(
        self,
        text: Prompt | Generation,
        *,
        at: int | None = None,
        mass: float = 0.01,
        depth: int = 8,
        nodes: int = 500,
        width: int = 50,
        sampled: bool = False,
        seconds: float | None = None,
        **options: Unpack[Options],
    ) -> Futures:
        """The most likely continuations as a tree, with their exact probabilities.

        Nothing is sampled: the likeliest continuations are extended first, several in one step.
        `futures.open(node)` is the text up to a node.

        text      a prompt, or a generation, whose options are used.
        at        continue a generation after this many of its tokens; negative: from the end.
        mass      leave out continuations whose probability (the product over their tokens) is less.
        depth     most tokens of a continuation.
        nodes     most tokens in the tree.
        width     most tokens considered after each other token.
        sampled   probabilities after the sampling stages; False: those of the model.
        seconds   stop after this time; None: no limit.

        Options are those of sampling, for `sampled=True`.
        """
        from unspool.decoding.search.futures import FutureGrowth

        growth = FutureGrowth(
            self,
            text,
            at=at,
            mass=mass,
            depth=depth,
            nodes=nodes,
            width=width,
            sampled=sampled,
            seconds=seconds,
            **options,
        )
        return growth.run()

    # -- infill, edit, diffusion, search ----------------------------------------------------------

    @document_options
    def fill(
        self,
        *parts: str | Gap,
        by: Literal["auto", "masked", "fim", "ranking"] = "auto",
        candidates: int = 20,
        drafts: int = 6,
        reach: int | None = 64,
        choices: Sequence[str] | None = None,
        twin: Session | MaskedModel | None = None,
        **options: Unpack[Options],
    ) -> Filling:
        """Infill: fill the gaps of a text: `lm.fill("The ", unspool.gap, " sat on the mat")`.

        parts        texts and gaps in turn, or one text with ___ for each gap. `gap(2)` has two
                     tokens, `gap(1, 8)` one to eight, `gap` alone up to sixteen.
        by           "masked": a masked model's predictions. "fim": FIM (fill-in-the-middle) tokens.
                     "ranking": candidates drafted from the left, ranked by the text on the right.
                     By default what the model supports.
        candidates   how many candidates are ranked in full, and returned.
        drafts       how many first tokens are continued where a gap may have several.
        reach        how many tokens after a gap count for the ranking; None: all.
        choices      rank only these texts.
        twin         a masked model that proposes candidates too.

        Options are those of sampling, for the drafts: greedy unless a temperature is given.
        """
        from unspool.decoding.infill.fill import fill

        return fill(
            self,
            parts,
            by=by,
            candidates=candidates,
            drafts=drafts,
            reach=reach,
            choices=choices,
            twin=twin,
            **options,
        )

    def edit(
        self,
        text: str,
        *,
        twin: Session | MaskedModel | None = None,
        doubt: Literal["auto", "causal", "masked", "both"] = "auto",
        threshold: float = 0.99,
        trust: float = 10.0,
        passes: int = 3,
        budget: int | None = None,
        places: int = 24,
        candidates: int = 12,
        reach: int | None = 24,
        progress: bool = True,
    ) -> Edit:
        """Revise a text: replace unlikely words where another word fits both sides better.

        twin         a masked model, which finds and proposes words too.
        doubt        what finds unlikely words: the causal model's surprise, the masked model, or
                     both; by default both if there is a twin.
        threshold    changes at least this probable are made; the others are only proposed:
                     `edit.apply(number)`, `edit.undo(number)`.
        trust        nats by which another word must beat the written one to count as equally
                     likely; a word that is one typo away needs 3 less. 0: none.
        passes       maximum passes over the text; it ends when one changes nothing.
        budget       maximum tokens computed to rank proposals; None: no limit.
        places       words examined in a pass, the least likely first.
        candidates   for each of them.
        reach        how many tokens after a word count; None: all.
        """
        from unspool.decoding.edit.edit import edit

        return edit(
            self,
            text,
            twin=twin,
            doubt=doubt,
            threshold=threshold,
            trust=trust,
            passes=passes,
            budget=budget,
            places=places,
            candidates=candidates,
            reach=reach,
            progress=progress,
        )

    @overload
    def diffuse(
        self, prompt: Prompt, *, progress: bool = True, **options: Unpack[DiffusionOptions]
    ) -> Diffusion: ...

    @overload
    def diffuse(
        self, prompt: Prompts, *, progress: bool = True, **options: Unpack[DiffusionOptions]
    ) -> Diffusions: ...

    def diffuse(
        self,
        prompt: Prompt | Prompts,
        *,
        progress: bool = True,
        **options: Unpack[DiffusionOptions],
    ) -> Diffusion | Diffusions:
        """Diffusion: fill masked places after a prompt in any order; needs a mask token.

        max_tokens, block    number of places (128), and places in a block (block diffusion).
        given                tokens that are set from the start; None: a masked place.
        order                threshold (0.9), factor (1), entropy (entropy_bound=0.1), left,
                             fixed, margin, random (k=1 a pass, or steps=), or a function.
        steps                maximum denoising steps of a block; 1: all places in one.
        remask, edit         mask a token again that becomes less likely than this; replace it by
                             another that is more likely than this.
        guidance, cache      classifier-free guidance; "prefix" and "dual" caches are approximate.
        twin                 a loaded LoRA adapter that fills the canvas after the model's own text.
        temperature, ...     as in `generate`, but 0 by default; seed, stop, top as there.
        json, grammar, ...   as there, with order="left" only.
        """
        from unspool.decoding.diffusion.diffuse import diffuse, diffuse_all

        if texts := split_batch(prompt):
            return diffuse_all(self, texts, dict(options), progress=progress)
        return diffuse(self, cast(Prompt, prompt), **options)

    def stream_diffusion(
        self, prompt: Prompt, **options: Unpack[DiffusionOptions]
    ) -> DiffusionStream:
        """`diffuse`, one denoising step at a time; `.result` is the text so far."""
        from unspool.decoding.diffusion.diffuse import stream_diffusion

        return stream_diffusion(self, prompt, **options)

    def canvas(
        self,
        prompt: Prompt,
        length: int,
        *,
        block: int | None = None,
        twin: str | None = None,
        mask: int | str | None = None,
        shifted: bool | None = None,
    ) -> Canvas:
        """Open masked places after a prompt, to fill them yourself: set, clear, logits, commit."""
        from unspool.decoding.diffusion.options import canvas_kind
        from unspool.engine.canvas import open_canvas

        options = {"block": block, "twin": twin, "mask": mask, "shifted": shifted}
        kind = canvas_kind(
            self, {name: value for name, value in options.items() if value is not None}
        )
        return open_canvas(self.engine, self.prompt_ids(prompt), length, kind)

    def think(
        self,
        prompt: Prompt,
        *,
        policy: str | Policy = "best-of",
        judge: VerifierLike = None,
        budget: int | None = 2000,
        progress: bool = True,
        **options: Any,
    ) -> Thought:
        """Test-time search: spend more tokens to find the text that a verifier scores best.

        policy    how to search: "best-of" writes n=8 texts and keeps the best. The others and their
                  options are in docs/reference/search-policies.md. Or a policy of your own.
        judge     the verifier: a name ("logprob", "certainty", "vote", ...), a function of a
                  `Generation` that returns a number or a bool, or a verifier object. By default
                  the most likely text wins.
        budget    maximum tokens computed in all: the prompt, everything generated, and what a
                  verifier model reads; None: no limit.
        options   those of the policy, and those of `generate` (max_tokens is the maximum of each
                  text). The same seed gives the same tree.
        """
        from unspool.decoding.search.think import think

        return think(
            self, prompt, policy=policy, judge=judge, budget=budget, progress=progress, **options
        )

    def stream_think(
        self,
        prompt: Prompt,
        *,
        policy: str | Policy = "best-of",
        judge: VerifierLike = None,
        budget: int | None = 2000,
        **options: Any,
    ) -> ThoughtStream:
        """`think` as a stream of events: iterate over it; `.result` is the final result."""
        from unspool.decoding.search.think import stream_think

        return stream_think(self, prompt, policy=policy, judge=judge, budget=budget, **options)

    # -- activations and interventions --------------------------------------------------------

    @overload
    def activations(
        self,
        text: TextLike,
        *,
        sites: Names = ...,
        layers: Layers = None,
        positions: Positions = None,
        interventions: Any = None,
        steer: Steer | None = None,
    ) -> ActivationCache: ...

    @overload
    def activations(
        self,
        text: Prompts | Sequence[Generation],
        *,
        sites: Names = ...,
        layers: Layers = None,
        positions: Positions = None,
        interventions: Any = None,
        steer: Steer | None = None,
    ) -> list[ActivationCache]: ...

    def activations(
        self,
        text: TextLike | Prompts | Sequence[Generation],
        *,
        sites: Names = ("resid_post",),
        layers: Layers = None,
        positions: Positions = None,
        interventions: Any = None,
        steer: Steer | None = None,
    ) -> ActivationCache | list[ActivationCache]:
        """Read activations as named numpy arrays: `lm.activations("Hi")["resid_post"]`.

        text           a text, token ids, a generation (read as it was written, with its adapter
                       and interventions), or a list of them, computed together.
        sites          names of sites: embedding, resid_pre, resid_mid, resid_post, attn_out,
                       head_out, mlp_out, recurrent_out, final_norm, pattern, logits; on the torch
                       backend also q, k, v, mlp_hidden. Or hook names of TransformerLens, such as
                       `blocks.5.hook_resid_post`.
        layers         an integer or several, from 0; negative: from the end; None: all.
        positions      "all", "last", "generated", an integer, a slice or a list of integers.
        interventions  what is changed inside the model while it is read.
        steer          steering vectors, as in `generate`.

        Arrays have an axis for layers, if the site has layers, and one for positions. A hook name
        as the key gives one layer.
        """
        from unspool.backends.interventions import as_interventions
        from unspool.lens.activation_cache import activation_caches

        batch = split_batch(text)
        caches = activation_caches(
            self,
            batch or [cast("TextLike", text)],
            sites=sites,
            layers=layers,
            positions=positions,
            interventions=(*as_interventions(interventions), *self.parse_steering(steer)),
        )
        return list(caches) if batch else next(caches)

    def save_activations(
        self,
        texts: str | Path | Iterable[Prompt],
        folder: str | Path,
        *,
        sites: Names = ("resid_post",),
        layers: Layers = None,
        positions: Positions = None,
        field: str = "text",
        max_tokens: int | None = None,
        dtype: str = "float32",
        format: Literal["safetensors", "parquet"] = "safetensors",
        shard_bytes: int = 256 << 20,
        progress: bool = True,
    ) -> SavedActivations:
        """Write the activations of many texts to a folder. The same call resumes after a stop.

        texts          a file (JSON lines, or lines of text), or an iterable of prompts.
        field          the text in each JSON object.
        max_tokens     longer texts are cut; by default to the context.
        dtype          float32 or float16.
        format         safetensors, or parquet (needs pyarrow).
        shard_bytes    size of a shard, which is held in memory until it is full.

        Each shard has a row for each position: `text`, `position`, `token`, and the activations by
        their hook names. Other arguments as in `activations`.
        """
        from unspool.lens.activation_files import count_texts, read_corpus, save_activations
        from unspool.progress import progress_bar

        source, total = texts, 0
        if isinstance(texts, str | Path):
            path = Path(texts).expanduser()
            total, source = count_texts(path, field), read_corpus(path, field)
        elif isinstance(texts, Sequence):
            total = len(texts)
        with progress_bar("reading", total, show=progress and bool(total)) as report:
            return save_activations(
                self,
                cast("Iterable[Prompt]", source),
                folder,
                sites=sites,
                layers=layers,
                positions=positions,
                max_tokens=max_tokens,
                dtype=dtype,
                format=format,
                shard_bytes=shard_bytes,
                report=report,
            )

    def steering_vector(
        self,
        positive: Sequence[TextLike],
        negative: Sequence[TextLike],
        *,
        layers: Layers = None,
        method: Literal["mean", "pca"] = "mean",
        pool: Literal["last", "mean"] = "last",
        name: str = "",
    ) -> SteeringVector:
        """Fit a steering vector from texts with and without a property.

        layers    layers to steer, from 0; None: all but the first, as in a control vector.
        method    "mean": difference of the means. "pca": first principal component of the
                  differences of pairs.
        pool      which tokens of a text count: "last", or the "mean" of all.

        Each direction is divided by the number of layers, so that a strength of 1 adds about one
        difference in all: `steer=[(vector, 1.5)]`.
        """
        from unspool.lens.steering import fit_steering_vector

        return fit_steering_vector(
            self, positive, negative, layers=layers, method=method, pool=pool, name=name
        )

    def load_steering_vector(
        self, vector: str | Path | SteeringVector, name: str | None = None
    ) -> SteeringVector:
        """Load a GGUF control vector (of Unspool, llama.cpp or repeng), and register its name.

        lm.load_steering_vector("happy.gguf")
        lm.generate("My day was", steer={"happy": 1.5})
        """
        from unspool.lens.steering import SteeringVector, load_steering_vector

        is_vector = isinstance(vector, SteeringVector)
        loaded = vector if isinstance(vector, SteeringVector) else load_steering_vector(vector)
        label = name or (loaded.name if is_vector else Path(str(vector)).stem)
        if not label:
            raise SettingsError("the steering vector needs a name")
        self._check_vector(loaded)
        self._shared.steering_vectors = {**self.steering_vectors, label: loaded}
        return loaded

    @property
    def steering_vectors(self) -> dict[str, SteeringVector]:
        """Steering vectors that `steer` may name; the default model has some."""
        if self._shared.steering_vectors is None:
            from unspool.lens.steering import shipped_vectors

            self._shared.steering_vectors = shipped_vectors() if self.is_default else {}
        return dict(self._shared.steering_vectors)

    def parse_steering(self, value: Any) -> tuple[Intervention, ...]:
        """Return the interventions of an option `steer`: vectors, or names, with strengths."""
        if value is None:
            return ()
        from unspool.lens.steering import combine, parse_steer

        vectors = parse_steer(value, self.steering_vectors)
        for vector in vectors:
            self._check_vector(vector)
        return combine(vectors)

    def _check_vector(self, vector: SteeringVector) -> None:
        fingerprint = self.model.fingerprint() if vector.fingerprint else ""
        vector.check_model(self.config.layers, self.config.width, fingerprint)

    def patch(
        self,
        clean: TextLike,
        corrupted: TextLike,
        *,
        metric: Callable[[Floats], float] | None = None,
        answer: int | str | None = None,
        other: int | str | None = None,
        site: str = "resid_post",
        sweep: Sequence[Axis] | None = None,
        layers: Layers = None,
        positions: Positions = None,
        heads: Sequence[int] | None = None,
        approximate: bool = False,
        progress: bool = True,
    ) -> Sweep:
        """Activation patching: which activations carry what the two texts differ in.

        Each run reads the corrupted text, with one activation replaced by that of the clean text.

        clean, corrupted   two texts with the same number of tokens.
        answer, other      tokens: the metric is the logit of `answer` minus that of `other`, or the
                           log-probability of `answer` alone.
        metric             instead: a function of the logits [vocabulary] at the last position.
        site               what is replaced; see `activations`.
        sweep              axes of the table: "layer", "position", "head"; others are replaced
                           together. By default layer and position, for head_out layer and head.
        approximate        estimate all cells from one gradient (attribution patching); needs
                           backend="torch", and an answer.
        """
        from unspool.lens.patching import patch

        return patch(
            self,
            clean,
            corrupted,
            metric=metric,
            answer=answer,
            other=other,
            site=site,
            sweep=sweep,
            layers=layers,
            positions=positions,
            heads=heads,
            approximate=approximate,
            progress=progress,
        )

    def ablate(
        self,
        text: TextLike,
        *,
        metric: Callable[[Floats], float] | None = None,
        answer: int | str | None = None,
        other: int | str | None = None,
        site: str = "head_out",
        sweep: Sequence[Axis] | None = None,
        layers: Layers = None,
        positions: Positions = None,
        heads: Sequence[int] | None = None,
        reference: Sequence[TextLike] | None = None,
        progress: bool = True,
    ) -> Sweep:
        """Ablation: what a metric becomes without each head, or another part, in turn.

        site        what is removed: head_out, attn_out, mlp_out, ...
        reference   texts over whose tokens the part is averaged (mean ablation); None: the part
                    is set to zero.

        Without answer and metric the metric is the mean log-probability of the text's tokens. Other
        arguments as in `patch`.
        """
        from unspool.lens.patching import ablate

        return ablate(
            self,
            text,
            metric=metric,
            answer=answer,
            other=other,
            site=site,
            sweep=sweep,
            layers=layers,
            positions=positions,
            heads=heads,
            reference=reference,
            progress=progress,
        )

    def features(
        self, text: TextLike, sae: SparseAutoencoder, *, top: int | None = None
    ) -> TokenFeatures:
        """Return the active features of each token, by a sparse autoencoder (`load_sae`).

        top   at most this many features of a token, the strongest.
        """
        from unspool.lens.sae import features

        return features(self, text, sae, top=top)

    def add_autoencoder(
        self, sae: str | Path | SparseAutoencoder, name: str | None = None
    ) -> SparseAutoencoder:
        """Load a sparse autoencoder (see `load_sae`), and register its name for the page.

        lm.add_autoencoder("sae-15")
        """
        from unspool.lens.sae import SparseAutoencoder, check_model, load_sae

        loaded = sae if isinstance(sae, SparseAutoencoder) else load_sae(sae)
        check_model(loaded, self.config)
        label = name or loaded.name or "sae"
        self._shared.autoencoders = {**self._shared.autoencoders, label: loaded}
        return loaded

    def feature_examples(
        self, texts: Iterable[TextLike], sae: SparseAutoencoder, feature: int, n: int = 10
    ) -> list[FeatureExample]:
        """Return the n places of a corpus where a feature is strongest, one for each text."""
        from unspool.lens.sae import feature_examples

        return feature_examples(self, texts, sae, feature, n)

    # -- inspection ---------------------------------------------------------------------------

    def look(self, text: TextLike, position: int = -1) -> Activations:
        """Return attention and residuals at one position of a text; negative: from the end.

        The position is that of the input token: its logits predict the token after it.
        """
        from unspool.lens.activations import get_activations

        return get_activations(self, text, position)

    def logit_lens(
        self,
        text: TextLike | Activations,
        position: int = -1,
        *,
        top: int = 5,
        token: int | str | None = None,
        full_vocabulary: bool = False,
        lens: str | AffineLens = "logit",
    ) -> LogitLens:
        """Logit lens: the next-token distribution of each layer, as if it were the last.

        text     a text and a position in it, or a result of `look`.
        token    the token to follow, an id or text that is one token; by default the token that was
                 sampled or, at the end of a text, the most likely one.
        top      number of candidates of each layer.
        full_vocabulary   also return every layer's log-probabilities of the whole vocabulary.
        lens     "logit", the name of a loaded lens ("tuned" comes with the default model), or a
                 result of `fit_lens`.
        """
        from unspool.lens.logit_lens import logit_lens

        return logit_lens(
            self,
            self._look_at(text, position),
            top=top,
            token=token,
            full_vocabulary=full_vocabulary,
            lens=self.find_lens(lens),
        )

    def fit_lens(
        self,
        texts: Sequence[Prompt],
        *,
        kind: LensKind = "tuned",
        rank: int = 64,
        max_tokens: int = 256,
        probes: int = 1,
        progress: bool = True,
    ) -> AffineLens:
        """Fit a lens that translates each layer's vector before the output head reads it.

        kind         "tuned": regression of the final vector (tuned lens). "jacobian": the mean
                     Jacobian of the final vector; needs backend="torch".
        rank         of the change to the vector; a lens of a higher rank is a larger file.
        max_tokens   of each text; the start is used.
        probes       of "jacobian": backward passes for each text. 0: the exact Jacobian, which
                     takes one for each token and dimension.

        A tuned lens needs tens of thousands of tokens like those it will read.
        """
        from unspool.lens.affine_lens import fit_lens

        return fit_lens(
            self,
            texts,
            kind=kind,
            rank=rank,
            max_tokens=max_tokens,
            probes=probes,
            progress=progress,
        )

    def load_lens(self, lens: str | Path | AffineLens, name: str | None = None) -> AffineLens:
        """Load a file that `AffineLens.save` wrote, and register its name for `logit_lens`."""
        from unspool.lens.affine_lens import AffineLens, load_lens

        loaded = lens if isinstance(lens, AffineLens) else load_lens(lens)
        self._check_lens(loaded)
        self._shared.lenses = {**self.lenses, name or loaded.name: loaded}
        return loaded

    @property
    def lenses(self) -> dict[str, AffineLens]:
        """Lenses that `logit_lens` can name beside "logit"; the default model has some."""
        if self._shared.lenses is None:
            from unspool.lens.affine_lens import shipped_lenses

            shape = self.config.layers, self.config.width
            self._shared.lenses = shipped_lenses(shape) if self.is_default else {}
        return dict(self._shared.lenses)

    def find_lens(self, lens: str | AffineLens) -> AffineLens | None:
        """Return a lens by its name; "logit" is None."""
        if lens == "logit":
            return None
        if not isinstance(lens, str):
            self._check_lens(lens)
            return lens
        if lens not in self.lenses:
            names = ", ".join(("logit", *self.lenses))
            raise SettingsError(
                f"there is no lens {lens[:100]!r} (loaded: {names}); load one with "
                "lm.load_lens(path)"
            )
        return self.lenses[lens]

    def _check_lens(self, lens: AffineLens) -> None:
        lens.check_model(self.config.layers, self.config.width, self.model.fingerprint())

    def attribution(
        self,
        text: TextLike | Activations,
        position: int = -1,
        *,
        token: int | str | None = None,
        against: int | str | None = None,
    ) -> Attribution:
        """Direct logit attribution: how much each part of the model raises a token's logit.

        text      a text and a position in it, or a result of `look`.
        token     an id, or text that is one token (" Paris"); by default the token that was sampled
                  or, at the end of a text, the most likely one.
        against   attribute the difference to another token, or to the mean of all logits ("mean").
        """
        from unspool.lens.attribution import attribution

        return attribution(self, self._look_at(text, position), token=token, against=against)

    def token_attribution(
        self,
        text: TextLike,
        position: int = -1,
        *,
        token: int | str | None = None,
        against: int | str | None = None,
        method: Literal["integrated", "gradient_x_input"] = "integrated",
        baseline: TextLike | None = None,
        steps: int = 64,
    ) -> TokenAttribution:
        """Attribute a token's logit to the tokens of the text, by gradients; needs backend="torch".

        text, position   a text, and the position that predicts the token.
        token, against   as in `attribution`; `against` is a token.
        method           "integrated": integrated gradients; their sum is the logit minus that of
                         the baseline. "gradient_x_input": the gradient times the embedding.
        baseline         where the path of integrated gradients starts: a text of as many tokens;
                         None: the mean of all embeddings. The first token then stays as it is.
        steps            points on the path; more are more exact (see `gap` of the result).
        """
        from unspool.lens.gradients import token_attribution

        return token_attribution(
            self,
            text,
            position,
            token=token,
            against=against,
            method=method,
            baseline=baseline,
            steps=steps,
        )

    def neighbours(self, token: int | str, count: int = 10) -> tuple[Neighbour, ...]:
        """Return the tokens with the most similar embeddings (by cosine), nearest first.

        A text must be a single token (most words are one with a space before them).
        """
        from unspool.lens.embeddings import neighbours

        return neighbours(self, token, count)

    def embed(self, text: TextLike | Prompts | Sequence[Generation]) -> Floats:
        """Embed a text as a unit vector, [width]: the mean of its tokens' final hidden states.

        A list of texts gives one row for each: [texts, width].
        """
        from unspool.lens.embeddings import embedding, embeddings

        if texts := split_batch(text):
            return embeddings(self, texts)
        return embedding(self, cast("TextLike", text))

    def _look_at(self, text: TextLike | Activations, position: int) -> Activations:
        from unspool.lens.activations import Activations

        return text if isinstance(text, Activations) else self.look(text, position)

    # -- traces ------------------------------------------------------------------------------------

    def trace(self, generation: Generation) -> Trace:
        """Return the trace of a text: everything that led to it. Use `explain=True` for detail."""
        from unspool.lens.trace import trace_of

        return trace_of(self, generation)

    def save_generation(self, generation: Generation, path: str | Path) -> None:
        """Write the trace of a text to a file; called by `generation.save(path)`."""
        from unspool.lens.trace import save_trace

        save_trace(self.trace(generation), path)

    def open(self, path: str | Path) -> Generation | Branch:
        """Open what `generation.save(path)` or `branch.save(path)` has written, to continue it.

            lm.generate("Once upon a time").save("story.json")
            story = lm.open("story.json").resume(max_tokens=50)

        The keys and values of a branch come from its file if model, adapter, backend and format
        are the same; else they are computed again. An adapter must be loaded under the same name
        first. If a text was written by another model, its `notes` say
        so.
        """
        from unspool.engine.page_files import is_page_file
        from unspool.lens.replay import generation_from
        from unspool.lens.trace import load_trace

        source = Path(path).expanduser()
        try:
            if is_page_file(source):
                return self._open_branch_file(source)
        except OSError as error:
            raise UnspoolError(f"{path} cannot be read: {error.strerror or error}") from error
        return generation_from(self, load_trace(source))

    def _open_branch_file(self, path: Path) -> Branch:
        from unspool.engine.page_files import (
            StoredPages,
            insert_computed,
            page_access,
            read_tokens,
        )

        access, stored = page_access(self.engine), None
        try:
            tokens, adapter = read_tokens(path)
            number = self.engine.adapters.number(adapter)
            with suppress(ValueError, KeyError, TypeError):  # damaged, or of another model
                stored = StoredPages.read(path, self.engine.page_identity(number), access)
        except (ValueError, KeyError, TypeError) as error:
            raise UnspoolError(f"{path} is damaged: {error}") from None
        self.prompt_ids(tokens)
        if stored is not None and access is not None:
            insert_computed(self.engine, [], stored, adapter=number)
        self.config.require_causal()
        return self.engine.open(tokens, adapter)

    def replay(self, trace: Trace | str | Path, *, tolerance: float | None = None) -> Replay:
        """Generate a traced text again, and report where it first differs.

        trace       a result of `trace`, or a file that `generation.save` wrote.
        tolerance   largest difference of log-probabilities that counts as equal; by default 1e-3,
                    and 0.1 for 16-bit weights.
        """
        from unspool.lens.replay import replay
        from unspool.lens.trace import load_trace

        loaded = load_trace(trace) if isinstance(trace, str | Path) else trace
        return replay(self, loaded, tolerance=tolerance)


def _as_list(tools: Any) -> Sequence[Any]:
    """Return a list as it is; anything else as a list of one item."""
    return tools if isinstance(tools, Sequence) and not isinstance(tools, str) else [tools]
