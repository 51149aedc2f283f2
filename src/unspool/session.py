"""A model with its tokenizer and its engine: the base of decoding, lenses and the server.

The public class is `LanguageModel` (`lm.py`), a session with all methods for users.

generation, steps = session.begin("Once upon a time", temperature=0.7, seed=7)
for step in generation.extend(steps):
    print(step.text, end="", flush=True)
"""

from __future__ import annotations

import copy
import json
import math
import reprlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

from unspool.backends.interventions import (
    BranchInterventions,
    Intervention,
    as_interventions,
    check_interventions,
    resolve,
)
from unspool.backends.placement import check_torch
from unspool.backends.step import LoadedModel
from unspool.engine.engine import Engine
from unspool.engine.generation import Generation, check_generation, why_full
from unspool.engine.reasoning import ReasoningSpec, find_reasoning, think_options
from unspool.engine.request import Drafter, DraftMaker, Options, Request, check_fits
from unspool.engine.request_builder import (
    ModelFacts,
    build_request,
    continued_request,
    parse_prompt_ids,
)
from unspool.engine.results import Candidate, Score, Step, StepStream
from unspool.engine.score import chosen_steps, explain, score_tokens
from unspool.engine.tree import Branch
from unspool.errors import (
    ContextError,
    ModelFileError,
    SettingsError,
    UnspoolError,
    check_int,
    count,
)
from unspool.model.config import ModelConfig
from unspool.model.files.checkpoint import load_transformer, open_checkpoint, save_checkpoint
from unspool.sampling import Grammar, GrammarVocabulary
from unspool.sampling import score as score_logits
from unspool.text.reasoning import ReasoningFormat, reasoning_format
from unspool.text.tokenizer.pieces import incomplete_utf8, readable_pieces
from unspool.text.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from unspool.lens.affine_lens import AffineLens
    from unspool.lens.sae import SparseAutoencoder
    from unspool.lens.steering import SteeringVector
    from unspool.model.layers.transformer import Transformer
    from unspool.text.chat.template import ChatPrompt, ChatTemplate

Prompt = str | Sequence[int]
Messages = str | Sequence[Mapping[str, Any]]
Drafts = Drafter | DraftMaker | None
Speculate = Any  # the option `speculate`: see `decoding/speculative/drafters.py`


class Session:
    """A model, its tokenizer, and the engine that computes its texts. Thread-safe."""

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: Tokenizer | None,
        *,
        path: Path | None = None,
        context: int | None = None,
        memory: int | None = None,
        make_drafter: Callable[[Session, Speculate], Drafts] | None = None,
        load_beside: Callable[[Session, str], Session] | None = None,
    ) -> None:
        self._shared = _Shared(model)
        self.path = path  # file or folder of the weights
        self.adapter: str | None = None  # the default LoRA adapter
        self.context = context or model.config.default_context  # maximum tokens of a text
        self._tokenizer = tokenizer
        self._token_bytes = partial(_token_bytes, tokenizer)
        end_ids = tokenizer.end_ids if tokenizer else frozenset()
        # Token ids that end a text.
        self.end_ids: frozenset[int] = end_ids | frozenset(model.config.end_ids)
        self._template: ChatTemplate | None = None
        self._memory = memory
        self._make_drafter, self._load_beside = make_drafter, load_beside
        self.view_of: Session | None = None  # the session that this is a view of; see `adapted`

    def __repr__(self) -> str:
        name = self.path.name if self.path else self.config.family
        return f"<{type(self).__name__} {name}, context {self.context}>"

    @property
    def model(self) -> LoadedModel:
        """The weights on their backend; any use of a closed session's model raises."""
        return self._shared.model

    @property
    def config(self) -> ModelConfig:
        """The model's architecture: layers, widths, vocabulary."""
        return self.model.config

    @property
    def vocab_size(self) -> int:
        """Number of tokens the model has a logit for."""
        return self.model.config.vocab_size

    @property
    def transformer(self) -> Transformer:
        """The torch module; only the torch backend has one."""
        transformer: Transformer | None = getattr(self.model, "transformer", None)
        if transformer is None:
            raise UnspoolError(
                "this needs the model as a torch module, in one process; load it with "
                "backend='torch'"
            )
        return transformer

    @property
    def tokenizer(self) -> Tokenizer:
        """Converts text to token ids, and back."""
        if self._tokenizer is None:
            raise ModelFileError(
                f"{self.path}: has no tokenizer (tokenizer.json); give prompts as token ids, "
                "or put the model's tokenizer.json next to its weights"
            )
        return self._tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """Formats conversations for this model."""
        if self._template is None:
            from unspool.text.chat.template import ChatTemplate  # imports Jinja

            self._template = ChatTemplate(self.tokenizer.chat_template, self.tokenizer)
        return self._template

    @cached_property
    def grammar_vocabulary(self) -> GrammarVocabulary:
        """The vocabulary in the form grammars need; built for the first grammar."""
        return GrammarVocabulary.from_tokenizer(self.tokenizer)

    def drafter(self, speculate: Speculate) -> Drafts:
        """Return the drafter for an option `speculate`."""
        if self._make_drafter is None:
            raise SettingsError("this model has no drafters; leave speculate out")
        return self._make_drafter(self, speculate)

    def load_similar(self, name: str) -> Session:
        """Load another model by name, on the same backend and device."""
        if self._load_beside is None:
            raise SettingsError("this model cannot load others by name; pass a loaded model")
        return self._load_beside(self, name)

    @property
    def _facts(self) -> ModelFacts:
        return ModelFacts(
            self.context,
            self.end_ids,
            self.vocab_size,
            lambda: self.grammar_vocabulary,
            self.drafter,
            self.single_token,
            self.adapter,
            self.thinking,
            self.check_interventions,
            self.parse_steering,
        )

    def parse_steering(self, value: Any) -> tuple[Intervention, ...]:
        """Return the interventions of an option `steer`; implemented by `LanguageModel`."""
        raise NotImplementedError

    def check_interventions(self, interventions: Sequence[Intervention]) -> None:
        """Raise SettingsError if the model or its backend cannot apply the interventions."""
        if interventions:
            sites, fingerprint = self.engine.backend.sites, self.model.fingerprint
            check_interventions(interventions, self.config, sites, fingerprint)

    @cached_property
    def thought_format(self) -> ReasoningFormat | None:
        """How the model marks its reasoning; None: it does not reason before it answers."""
        if self._tokenizer is None:
            return None
        return reasoning_format(self._tokenizer.chat_template, self._tokenizer)

    @property
    def is_instruct(self) -> bool:
        """Whether the model has a chat template."""
        return self._tokenizer is not None and self._tokenizer.chat_template is not None

    @property
    def is_default(self) -> bool:
        """Whether this is the small model that `load()` uses by default."""
        from unspool.model.hub.download import DEFAULT

        return self.path is not None and self.path.name == DEFAULT.file_name

    # -- generation -------------------------------------------------------------------------

    def chat_prompt(
        self, messages: Messages, *, system: str | None = None, **options: Any
    ) -> ChatPrompt:
        """Return a conversation as token ids, for `begin`; `system` is put before its messages."""
        chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if not isinstance(chat, Sequence) or not all(isinstance(m, Mapping) for m in chat):
            raise SettingsError(
                "messages must be a question, or a list of {'role': 'user', 'content': '...'}, got "
                f"{reprlib.repr(messages)}"
            )
        if system is not None:
            if not isinstance(system, str):
                raise SettingsError(f"system must be text, got {reprlib.repr(system)}")
            if chat and chat[0].get("role") in ("system", "developer"):
                raise SettingsError(
                    "system= is given and the messages start with a system message; give only one"
                )
            chat = [{"role": "system", "content": system}, *chat]
        is_unfinished = bool(chat) and chat[-1].get("role") == "assistant"
        return self.chat_template.encode(
            chat,
            continue_final_message=options.pop("continue_final_message", is_unfinished),
            **options,
        )

    def thinking(self, prompt: Sequence[int]) -> ReasoningSpec | None:
        """Return how the answer to a prompt contains reasoning; None: it has none."""
        format = self.thought_format
        if format is None:
            return None
        return find_reasoning(format, prompt, self.tokenizer.token_text, self.end_ids)

    def think_options(self, think: bool | str | None, options: Any) -> dict[str, Any]:
        """Return the chat template's options for reasoning, and add the text's own to `options`.

        `think` is whether to reason, or the effort; None: the model's default.
        """
        return think_options(self.thought_format, think, options)

    def begin(self, prompt: Prompt, **options: Unpack[Options]) -> tuple[Generation, StepStream]:
        """Start a generation; return it, still empty, and the stream of its steps."""
        generation = self.prepare_generation(prompt, **options)
        return generation, self.engine.submit(generation.request)

    def prepare_generation(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """Return a generation that starts when it is resumed; options as in `stream`."""
        request = self.request(prompt, dict(options))
        self.config.require_causal()
        self.config.require_head()
        return Generation(request, empty_reason=why_full(request, 0), source=self)

    def request(self, prompt: Prompt, options: dict[str, Any]) -> Request:
        """Check a caller's options and return the request; options as in `stream`."""
        longer = bool(options.get("endless"))
        return build_request(self._facts, self.prompt_ids(prompt, longer=longer), options)

    # -- continuing a text (see `engine/generation.py`) ------------------------------------------

    def continue_generation(self, generation: Generation, **options: Unpack[Options]) -> StepStream:
        """Continue a generation; return the stream of new steps. Options as in `stream`."""
        generation.request = continued_request(self._facts, generation, dict(options))
        return self.engine.submit(generation.request)

    def reattach(self, generation: Generation, **options: Unpack[Options]) -> Generation:
        """Attach this model to a text whose request was stored without what depends on the model:
        reasoning, grammar, guards, drafter. The options are those that the text was started with.
        """
        self.prompt_ids([*generation.prompt, *generation.tokens])
        limits = generation.request.limits
        request = continued_request(self._facts, generation, dict(options))
        limits = replace(limits, context=min(limits.context, self.context))
        self.check_interventions(request.interventions)
        return replace(generation, request=replace(request, limits=limits, written=()), source=self)

    def save_generation(self, generation: Generation, path: str | Path) -> None:
        """Write a text to a file; implemented by `LanguageModel`."""
        raise NotImplementedError

    def attach(self, generation: Generation) -> Generation:
        """Attach this model to a generation from a pickle or another process, to continue it."""
        check_generation(generation)
        request = generation.request
        longer = request.limits.endless is not None
        self.prompt_ids([*request.prompt, *generation.tokens], longer=longer)
        if request.grammar is not None:
            grammar = Grammar.compile(request.grammar.spec, self.grammar_vocabulary)
            request = replace(request, grammar=grammar)
        return replace(generation, request=request, source=self)

    def choices(
        self,
        tokens: Sequence[int],
        top: int,
        adapter: str | None = None,
        interventions: BranchInterventions | None = None,
    ) -> tuple[Candidate, ...]:
        """Return the most likely tokens after these."""
        with self.open_branch(tokens, adapter, interventions) as branch:
            logits = self.engine.extend(branch)
        scores = score_logits(logits[-1:], [0], top)
        best = zip(scores.top_tokens[0], scores.top_logprobs[0], strict=True)
        partial = self.partial_utf8(tokens)
        return tuple(
            Candidate(
                int(token), self.readable(int(token), partial), float(logprob), math.exp(logprob)
            )
            for token, logprob in best
        )

    def chosen_steps(
        self,
        tokens: Sequence[int],
        addition: str | int | Sequence[int],
        adapter: str | None = None,
        interventions: BranchInterventions | None = None,
    ) -> list[Step]:
        """Return steps for tokens that a person appends to these, with the model's scores."""
        added = self._chosen_ids(addition)
        self.prompt_ids([*tokens, *added])
        with self.open_branch([*tokens, *added[:-1]], adapter, interventions) as branch:
            logits = self.engine.extend(branch, num_logits=len(added))
        return chosen_steps(logits, added, len(tokens), self._token_bytes)

    def token_bytes(self, token: int) -> bytes:
        """Return a token's bytes in a text; control tokens and unused ids have none."""
        return self._token_bytes(token)

    def _chosen_ids(self, addition: str | int | Sequence[int]) -> list[int]:
        """Return token ids from text, a token id, or several ids."""
        if isinstance(addition, str):
            ids = self.tokenizer.encode(addition)
        elif isinstance(addition, Sequence):
            ids = [check_int("the chosen token", token) for token in addition]
        else:
            ids = [check_int("the chosen token", addition)]
        if not ids:
            raise SettingsError(f"give at least one word or token id, got {addition!r}")
        return ids

    def explain(self, generation: Generation, top: int) -> list[Step]:
        """Return the steps of a generation with all details of the sampling."""
        if generation.request.limits.num_truncated(len(generation.prompt) + len(generation.steps)):
            raise ContextError(
                "the text outgrew the context, so it cannot be explained afterwards; generate it "
                "with explain=True"
            )
        request = generation.request
        with self.open_branch(
            generation.prompt, request.adapter, request.branch_interventions()
        ) as branch:
            return explain(self.engine, branch, generation.request, generation.steps, top)

    # -- adapters (see `model/adapters.py`) ------------------------------------------------------

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Load a LoRA adapter from a folder (PEFT's format) under a name.

            lm.load_adapter("poet", "adapters/poet")
            print(lm.generate("The sea", adapter="poet"))

        Texts with different adapters and without any run in one batch. A name that is loaded
        already refers to the new adapter from now on.
        """
        if not name:
            raise SettingsError("the adapter needs a name")
        from unspool.model.adapters import read_adapter

        self.engine.adapters.load(name, read_adapter(Path(folder), self.config))

    def adapted(self, name: str) -> Self:
        """Return a view of the same model and engine that uses this adapter by default."""
        self.engine.adapters.number(name)  # raises if it is not loaded
        view = copy.copy(self)
        view.adapter = name
        view.view_of = self  # the view keeps the model alive
        return view

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; running texts with it are finished."""
        self.engine.adapters.unload(name)

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that are loaded."""
        return self.engine.adapters.names

    # -- the engine ----------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """Computes the model's texts; created for the first one."""
        shared = self._shared
        engine = shared.engine
        if engine is None:
            with shared.lock:
                if shared.is_closed:
                    raise UnspoolError(_CLOSED)
                if shared.engine is None:
                    backend = shared.model.backend(memory=self._memory, context=self.context)
                    shared.engine = Engine(
                        backend,
                        self._token_bytes,
                        check_head=self.config.require_head,
                        # The engine must not keep the session alive.
                        identity=partial(_computation, shared.model, self.config, self.context),
                    )
                    # The engine's thread has no reference to the session, which can be collected.
                    owner = self.view_of or self
                    shared.finalizer = weakref.finalize(owner, shared.engine.loop.close)
                engine = shared.engine
        return engine

    @contextmanager
    def open_branch(
        self,
        tokens: Sequence[int],
        adapter: str | None = None,
        interventions: BranchInterventions | None = None,
    ) -> Iterator[Branch]:
        """Open a branch with these tokens, read left to right; it is released at the end."""
        self.config.require_causal()
        if adapter is not None and not isinstance(adapter, str):
            raise SettingsError(f"adapter must be the name of a loaded adapter, got {adapter!r}")
        branch = self.engine.open(tokens, adapter or self.adapter, interventions)
        try:
            yield branch
        finally:
            self.engine.release(branch)

    def close(self) -> None:
        """Stop the engine and free the weights and the KV cache, also of all views.

        Running generations end. Safe to call twice. Memory that another thread is still reading is
        freed when that thread is done.
        """
        shared = self._shared
        with shared.lock:
            if shared.is_closed:
                return
            if shared.engine is not None:
                shared.engine.loop.check_caller()
            shared.is_closed = True
            engine, shared.engine = shared.engine, None
            finalizer, shared.finalizer = shared.finalizer, None
        if engine is not None:
            engine.close()
        if finalizer is not None:
            finalizer.detach()  # it has a reference to the engine
        getattr(shared.model, "close", lambda: None)()  # other processes may have parts of it
        shared.model = cast(LoadedModel, _ClosedModel(shared.model))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prompt_ids(
        self, prompt: Prompt, *, longer: bool = False, parse_special: bool = False
    ) -> list[int]:
        """Return a prompt as token ids, checked: not empty, in the vocabulary, within the context.

        Args:
            prompt: Text or token ids.
            longer: The prompt may be longer than the context.
            parse_special: Encode control tokens that the text spells out as control tokens.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer.encode_prompt(prompt, specials=parse_special)
        else:
            ids = parse_prompt_ids(prompt)
            last = self.config.vocab_size - 1
            if ids and (min(ids) < 0 or max(ids) > last):
                invalid = next(token for token in ids if not 0 <= token <= last)
                raise UnspoolError(
                    f"token {invalid} is not in the vocabulary, which goes from 0 to {last}"
                )
        if not ids:
            raise UnspoolError("the prompt is empty; give at least one token")
        if not longer:
            check_fits(len(ids), self.context, self.config.context)
        return ids

    # -- sparse autoencoders ----------------------------------------------------------------

    @property
    def autoencoders(self) -> dict[str, SparseAutoencoder]:
        """Sparse autoencoders by name; `LanguageModel.add_autoencoder` adds one."""
        return dict(self._shared.autoencoders)

    # -- scoring ----------------------------------------------------------------------------

    def score(
        self,
        text: Prompt,
        *,
        top: int = 0,
        adapter: str | None = None,
        interventions: Intervention | Sequence[Intervention | Mapping[str, Any]] | None = None,
    ) -> Score:
        """Return the log-probability of each token of a text given those before it.

        With `top`, also the most likely candidates at each position. With `interventions`, those
        of the steered model; the whole text counts as a prompt.
        """
        check_int("top", top)
        ids = self.prompt_ids(text)
        # The start token that the tokenizer adds is read but not scored.
        lead = isinstance(text, str) and self.tokenizer.add_bos
        steering = as_interventions(interventions)
        self.check_interventions(steering)
        with self.open_branch(ids[:1], adapter, resolve(steering, len(ids))) as branch:
            return score_tokens(
                self.engine, branch, ids, top=top, lead=int(lead), readable=self.readable
            )

    def readable(self, token: int, partial_utf8: bytes = b"") -> str:
        """Return a token as readable text; `partial_utf8` is an incomplete character before it."""
        if self._tokenizer is None or token >= len(self._tokenizer):
            return ""
        return self._tokenizer.token_text(token, partial_utf8)

    def readable_all(self, tokens: Sequence[int]) -> list[str]:
        """Return the tokens of one text as readable pieces; a character is at its last token."""
        if self._tokenizer is None:
            return [""] * len(tokens)
        token_bytes, size = self._tokenizer.token_bytes, len(self._tokenizer)
        return readable_pieces(token_bytes(token) if token < size else b"" for token in tokens)

    def partial_utf8(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of an incomplete UTF-8 character at the end of these tokens."""
        return incomplete_utf8(b"".join(map(self._token_bytes, tokens[-4:])))

    def single_token(self, text: str) -> int:
        """Return the id of a text that is one token; most words are, with a space before them."""
        ids = self.tokenizer.encode(text)
        if len(ids) != 1:
            pieces = ", ".join(f"{self.readable(i)!r} ({i})" for i in ids[:8]) or "none"
            raise SettingsError(
                f"{text!r} must be one token, got {count(len(ids), 'token')}: {pieces}"
            )
        return ids[0]

    def save(self, folder: str | Path) -> None:
        """Save the model to a folder that transformers (and `load`) can read; needs torch."""
        if self.adapter is not None:
            raise SettingsError(
                "this model uses an adapter, which is not part of its weights; merge it first: "
                "unspool train merge ADAPTER FOLDER"
            )
        save_checkpoint(self._transformer_to_save(), folder)
        if self._tokenizer is not None:
            self._tokenizer.save(folder)

    def _transformer_to_save(self) -> Transformer:
        """Return the torch module; a native model is read again from its file."""
        if hasattr(self.model, "transformer"):
            return self.transformer
        if self.path is None:
            raise UnspoolError("this model was not loaded from a file, so it cannot be saved")
        check_torch()
        return load_transformer(open_checkpoint(self.path))


_CLOSED = "this model was closed; load it again: unspool.load()"


def _computation(model: LoadedModel, config: ModelConfig, context: int) -> tuple[object, ...]:
    """What the bits of keys and values depend on besides the tokens."""
    return (
        model.fingerprint(),
        json.dumps(config.to_dict(), sort_keys=True, default=str),
        context,
        model.precision,
        model.numerics,
    )


class _Shared:
    """What a session and its views share, until one of them is closed."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.engine: Engine | None = None  # started by the first request
        self.finalizer: weakref.finalize[Any, Any] | None = None
        self.is_closed = False
        # By name; None: those of the default model are not read yet.
        self.steering_vectors: dict[str, SteeringVector] | None = None
        self.autoencoders: dict[str, SparseAutoencoder] = {}
        self.lenses: dict[str, AffineLens] | None = None
        self.lock = threading.Lock()  # held while the engine starts or closes


class _ClosedModel:
    """Replaces a model whose memory was freed: any use of it raises."""

    def __init__(self, model: LoadedModel) -> None:
        self.config, self.device = model.config, model.device

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnspoolError(_CLOSED)


def _token_bytes(tokenizer: Tokenizer | None, token: int) -> bytes:
    """See `Session.token_bytes`. Does not refer to the session, which can be collected."""
    if tokenizer is None or token >= len(tokenizer) or token in tokenizer.special_ids:
        return b""
    return tokenizer.token_bytes(token)
