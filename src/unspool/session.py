"""A model with its vocabulary and its engine: what decoding, lenses and the server stand on.

People hold a `LanguageModel` (`language_model.py`), which is a session with a face.

generation, steps = session.begin("Once upon a time", temperature=0.7, seed=7)
for step in generation.extend(steps):
    print(step.text, end="", flush=True)
"""

from __future__ import annotations

import copy
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

from unspool.backends.base import Loaded
from unspool.backends.torch.available import check_torch
from unspool.engine.branch import Branch
from unspool.engine.ending import check_fits
from unspool.engine.engine import Engine
from unspool.engine.generation import Generation, check_generation, why_full
from unspool.engine.judge import chosen_steps, explain, judge
from unspool.engine.options import Options
from unspool.engine.request import Drafter, DraftMaker, Request
from unspool.engine.steps import Candidate, Score, Step
from unspool.engine.stream import StepStream
from unspool.engine.thinking import Thinking, think_options, thinking_of
from unspool.errors import (
    ContextError,
    ModelFileError,
    SettingsError,
    UnspoolError,
    check_int,
    count,
)
from unspool.model.checkpoint import load_transformer, open_checkpoint, save_checkpoint
from unspool.model.config import ModelConfig
from unspool.request_options import ModelFacts, build_request, continued_request, given_ids
from unspool.sampling import Grammar, GrammarVocabulary
from unspool.sampling import score as score_logits
from unspool.text.chat.template import ChatPrompt, ChatTemplate
from unspool.text.thoughts.formats import ThoughtFormat, thought_format
from unspool.text.tokenizer.characters import readable_pieces, unfinished
from unspool.text.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from unspool.model.transformer import Transformer

Prompt = str | Sequence[int]
Messages = str | Sequence[Mapping[str, Any]]
Drafts = Drafter | DraftMaker | None
Speculate = Any  # what a caller may give as `speculate`: see `decoding/speculative.py`


class Session:
    """A model, its vocabulary, and the engine that computes its texts."""

    def __init__(
        self,
        model: Loaded,
        tokenizer: Tokenizer | None,
        *,
        path: Path | None = None,
        context: int | None = None,
        memory: int | None = None,
        make_drafter: Callable[[Session, Speculate], Drafts] | None = None,
        load_beside: Callable[[Session, str], Session] | None = None,
    ) -> None:
        self._shared = _Shared(model)
        self.path = path
        self.adapter: str | None = None  # what texts are written with that name none
        self.context = context or model.config.default_context
        self._tokenizer = tokenizer
        self._token_bytes = partial(_token_bytes, tokenizer)
        known = tokenizer.end_ids if tokenizer else frozenset()
        self.end_ids: frozenset[int] = known | frozenset(model.config.end_ids)
        self._template: ChatTemplate | None = None
        self._memory = memory
        self._make_drafter, self._load_beside = make_drafter, load_beside
        self.seen_of: Session | None = None  # the one that this is a view of; see `adapted`

    def __repr__(self) -> str:
        name = self.path.name if self.path else self.config.family
        return f"<{type(self).__name__} {name}, context {self.context}>"

    @property
    def model(self) -> Loaded:
        """The weights, on their backend; of a closed session, something that refuses all use."""
        return self._shared.model

    @property
    def config(self) -> ModelConfig:
        """What the model is: layers, widths, vocabulary."""
        return self.model.config

    @property
    def vocab_size(self) -> int:
        """How many tokens the model has a logit for."""
        return self.model.config.vocab_size

    @property
    def transformer(self) -> Transformer:
        """The torch module below, where there is one."""
        found: Transformer | None = getattr(self.model, "transformer", None)
        if found is None:
            raise UnspoolError(
                "this needs the whole model as a torch transformer, in one process; load it with "
                "backend='torch'"
            )
        return found

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's vocabulary: text to token ids, and back."""
        if self._tokenizer is None:
            raise ModelFileError(
                f"{self.path}: has no vocabulary (tokenizer.json); give prompts as token ids, "
                "or put the model's tokenizer.json beside its weights"
            )
        return self._tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """How a conversation is written for this model."""
        if self._template is None:
            self._template = ChatTemplate(self.tokenizer.chat_template, self.tokenizer)
        return self._template

    @cached_property
    def grammar_vocabulary(self) -> GrammarVocabulary:
        """The vocabulary as grammars see it; made once, when the first grammar is used."""
        return GrammarVocabulary.of(self.tokenizer)

    def drafter(self, speculate: Speculate) -> Drafts:
        """Who guesses ahead, from what a caller gave as `speculate`."""
        if self._make_drafter is None:
            raise SettingsError("this model was made without drafters; leave speculate out")
        return self._make_drafter(self, speculate)

    def beside(self, name: str) -> Session:
        """Another model by its name, loaded to run where this one does."""
        if self._load_beside is None:
            raise SettingsError("this model was made without a way to load others; give a model")
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
        )

    @cached_property
    def thought_format(self) -> ThoughtFormat | None:
        """How the model sets its thoughts apart; None: it does not think before it answers."""
        if self._tokenizer is None:
            return None
        return thought_format(self._tokenizer.chat_template, self._tokenizer)

    @property
    def is_instruct(self) -> bool:
        """Whether the model came with a chat template."""
        return self._tokenizer is not None and self._tokenizer.chat_template is not None

    @property
    def is_default(self) -> bool:
        """Whether this is the small model that is loaded where none is named."""
        from unspool.model.default_model import DEFAULT

        return self.path is not None and self.path.name == DEFAULT.file_name

    # -- writing ----------------------------------------------------------------------------

    def chat_prompt(
        self, messages: Messages, *, system: str | None = None, **options: Any
    ) -> ChatPrompt:
        """A conversation as token ids, ready for `begin`; `system` is put before its messages."""
        asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if not isinstance(asked, Sequence) or not all(isinstance(one, Mapping) for one in asked):
            raise SettingsError(
                f"the messages are {reprlib.repr(messages)}; they may be a question, or a list of "
                "{'role': 'user', 'content': '...'}"
            )
        if system is not None:
            if not isinstance(system, str):
                raise SettingsError(f"system must be text, got {reprlib.repr(system)}")
            if asked and asked[0].get("role") in ("system", "developer"):
                raise SettingsError(
                    "system= is given and the messages begin with a system message; give one"
                )
            asked = [{"role": "system", "content": system}, *asked]
        unfinished = bool(asked) and asked[-1].get("role") == "assistant"
        return self.chat_template.encode(
            asked,
            continue_final_message=options.pop("continue_final_message", unfinished),
            **options,
        )

    def thinking(self, prompt: Sequence[int]) -> Thinking | None:
        """What is known of the thoughts in an answer to a prompt; None: there will be none."""
        format = self.thought_format
        if format is None:
            return None
        return thinking_of(format, prompt, self.tokenizer.token_text, self.end_ids)

    def think_options(self, think: bool | str | None, options: Any) -> dict[str, Any]:
        """What a chat template is told of thinking; puts what the text needs into its options.

        `think`: whether to, or with how much effort; None: as is usual for the model.
        """
        return think_options(self.thought_format, think, options)

    def begin(self, prompt: Prompt, **options: Unpack[Options]) -> tuple[Generation, StepStream]:
        """A generation without steps yet, and the steps to come; options as in `stream`."""
        generation = self.draft(prompt, **options)
        return generation, self.engine.submit(generation.request)

    def draft(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """A generation of which nothing is computed until it is resumed; options as in `stream`."""
        request = self.request(prompt, dict(options))
        self.config.check_left_to_right()
        self.config.check_head()
        return Generation(request, empty_reason=why_full(request, 0), source=self)

    def request(self, prompt: Prompt, options: dict[str, Any]) -> Request:
        """What a caller asks for, checked; options as in `stream`."""
        longer = bool(options.get("endless"))
        return build_request(self._facts, self.prompt_ids(prompt, longer=longer), options)

    # -- going on with what was written (see `engine/generation.py`) ---------------------------

    def write_on(self, generation: Generation, **options: Unpack[Options]) -> StepStream:
        """The steps that follow what a generation holds; options as in `stream`."""
        generation.request = continued_request(self._facts, generation, dict(options))
        return self.engine.submit(generation.request)

    def attach(self, generation: Generation) -> Generation:
        """A generation that came from elsewhere (a pickle, another process), to go on with here."""
        check_generation(generation)
        request = generation.request
        longer = request.limits.endless is not None
        self.prompt_ids([*request.prompt, *generation.tokens], longer=longer)
        if request.grammar is not None:
            grammar = Grammar.compile(request.grammar.spec, self.grammar_vocabulary)
            request = replace(request, grammar=grammar)
        return replace(generation, request=request, source=self)

    def choices(
        self, tokens: Sequence[int], top: int, adapter: str | None = None
    ) -> tuple[Candidate, ...]:
        """The likeliest tokens behind these."""
        with self.opened(tokens, adapter) as branch:
            logits = self.engine.extend(branch)
        found = score_logits(logits[-1:], [0], top)
        best = zip(found.top_tokens[0], found.top_logprobs[0], strict=True)
        begun = self.begun(tokens)
        return tuple(
            Candidate(
                int(token), self.readable(int(token), begun), float(logprob), math.exp(logprob)
            )
            for token, logprob in best
        )

    def chosen_steps(
        self,
        tokens: Sequence[int],
        chosen: str | int | Sequence[int],
        adapter: str | None = None,
    ) -> list[Step]:
        """Steps for tokens that a person puts behind these, as the model judges them."""
        added = self._chosen_ids(chosen)
        self.prompt_ids([*tokens, *added])
        with self.opened([*tokens, *added[:-1]], adapter) as branch:
            logits = self.engine.extend(branch, wanted=len(added))
        return chosen_steps(logits, added, len(tokens), self._token_bytes)

    def _chosen_ids(self, chosen: str | int | Sequence[int]) -> list[int]:
        """The token ids of what a person chose: words, a token id, or several ids."""
        if isinstance(chosen, str):
            ids = self.tokenizer.encode(chosen)
        elif isinstance(chosen, Sequence):
            ids = [check_int("the chosen token", token) for token in chosen]
        else:
            ids = [check_int("the chosen token", chosen)]
        if not ids:
            raise SettingsError(f"nothing was chosen: give words or token ids, got {chosen!r}")
        return ids

    def explain(self, generation: Generation, top: int) -> list[Step]:
        """The steps of a generation with all that can be said of how they were picked."""
        if generation.request.limits.forgotten(len(generation.prompt) + len(generation.steps)):
            raise ContextError(
                "the text outgrew the context, and how it was picked can be told only while it is "
                "written; write it with explain=True"
            )
        with self.opened(generation.prompt, generation.request.adapter) as branch:
            return explain(self.engine, branch, generation.request, generation.steps, top)

    # -- adapters (see `model/adapters.py`) ------------------------------------------------------

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Have the LoRA adapter in a folder (PEFT's format) for texts that ask for it by name.

        lm.load_adapter("poet", "adapters/poet")
        print(lm.generate("The sea", adapter="poet"))

        Texts with different adapters and without any are written in one batch. A name that is
        loaded already stands for the new adapter from now on.
        """
        if not name:
            raise SettingsError("the adapter has no name; give it one to ask for it by")
        from unspool.model.adapters import read_adapter

        self.engine.adapters.load(name, read_adapter(Path(folder), self.config))

    def adapted(self, name: str) -> Self:
        """The same model and engine, with this adapter in everything that is asked of it."""
        self.engine.adapters.number(name)  # it must be there
        view = copy.copy(self)
        view.adapter = name
        view.seen_of = self  # whoever holds the view keeps the model
        return view

    def unload_adapter(self, name: str) -> None:
        """Let an adapter go; texts that are being written with it are finished."""
        self.engine.adapters.unload(name)

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that are loaded."""
        return self.engine.adapters.names

    # -- the engine below ----------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """Computes the model's texts; made when the first one comes, and only once."""
        shared = self._shared
        engine = shared.engine
        if engine is None:
            with shared.lock:
                if shared.is_closed:
                    raise UnspoolError(_CLOSED)
                if shared.engine is None:
                    backend = shared.model.backend(memory=self._memory, context=self.context)
                    shared.engine = Engine(
                        backend, self._token_bytes, check_head=self.config.check_head
                    )
                    # The engine's thread holds no session, so that both can go together.
                    owner = self.seen_of or self
                    shared.finalizer = weakref.finalize(owner, shared.engine.loop.close)
                engine = shared.engine
        return engine

    @contextmanager
    def opened(self, tokens: Sequence[int], adapter: str | None = None) -> Iterator[Branch]:
        """A branch with these tokens, read from left to right, and released again afterwards."""
        self.config.check_left_to_right()
        if adapter is not None and not isinstance(adapter, str):
            raise SettingsError(f"adapter must be the name of a loaded adapter, got {adapter!r}")
        branch = self.engine.open(tokens, adapter or self.adapter)
        try:
            yield branch
        finally:
            self.engine.release(branch)

    def close(self) -> None:
        """Stop the engine and free the weights and the KV cache, also of all views.

        What is being written ends, and nothing more can be. Safe to call twice. Memory that another
        thread is still reading is freed when that thread is done.
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
            finalizer.detach()  # it holds the engine
        getattr(shared.model, "close", lambda: None)()  # other processes may hold parts of it
        shared.model = cast(Loaded, _ClosedModel(shared.model))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prompt_ids(
        self, prompt: Prompt, *, longer: bool = False, parse_special: bool = False
    ) -> list[int]:
        """A prompt as token ids, checked: not empty, in the vocabulary, within the context (unless
        it may be longer). With `parse_special`, control tokens that a text spells are control."""
        if isinstance(prompt, str):
            ids = self.tokenizer.encode_prompt(prompt, specials=parse_special)
        else:
            ids = given_ids(prompt)
            known = range(self.config.vocab_size)
            strange = [token for token in ids if token not in known]
            if strange:
                raise UnspoolError(
                    f"token {strange[0]} is not in the vocabulary, which goes from 0 to {known[-1]}"
                )
        if not ids:
            raise UnspoolError("the prompt is empty; give the model at least one token to go on")
        if not longer:
            check_fits(len(ids), self.context, self.config.context)
        return ids

    # -- judging ----------------------------------------------------------------------------

    def score(self, text: Prompt, *, top: int = 0, adapter: str | None = None) -> Score:
        """Log-probability of each token of a text given those before it.

        With `top`, also the likeliest candidates at each position.
        """
        check_int("top", top)
        ids = self.prompt_ids(text)
        # A start token that the model wants before every text is read but not judged.
        lead = isinstance(text, str) and self.tokenizer.add_bos
        with self.opened(ids[:1], adapter) as branch:
            return judge(self.engine, branch, ids, top=top, lead=int(lead), readable=self.readable)

    def readable(self, token: int, begun: bytes = b"") -> str:
        """A token as text, for people, behind what a text ends with (`begun`)."""
        if self._tokenizer is None or token >= len(self._tokenizer):
            return ""
        return self._tokenizer.token_text(token, begun)

    def readable_all(self, tokens: Sequence[int]) -> list[str]:
        """The tokens of one text, each as text: a character stands at the last of its tokens."""
        if self._tokenizer is None:
            return [""] * len(tokens)
        known, size = self._tokenizer.token_bytes, len(self._tokenizer)
        return readable_pieces(known(token) if token < size else b"" for token in tokens)

    def begun(self, tokens: Sequence[int]) -> bytes:
        """The bytes of a character that is not whole yet at the end of these tokens."""
        return unfinished(b"".join(map(self._token_bytes, tokens[-4:])))

    def single_token(self, text: str) -> int:
        """The id of a text that is one token; most words are one with a space before them."""
        ids = self.tokenizer.encode(text)
        if len(ids) != 1:
            pieces = ", ".join(f"{self.readable(i)!r} ({i})" for i in ids[:8]) or "none"
            raise SettingsError(
                f"{text!r} is {count(len(ids), 'token')}: {pieces}; name one of them"
            )
        return ids[0]

    def save(self, folder: str | Path) -> None:
        """Write a folder that transformers (and `load`) can read; needs torch."""
        if self.adapter is not None:
            raise SettingsError(
                "this model writes with an adapter, which is no part of its weights; merge it: "
                "unspool train merge ADAPTER FOLDER"
            )
        save_checkpoint(self._transformer_to_save(), folder)
        if self._tokenizer is not None:
            self._tokenizer.save(folder)

    def _transformer_to_save(self) -> Transformer:
        """The model's own transformer; a native model is read again from its file."""
        if hasattr(self.model, "transformer"):
            return self.transformer
        if self.path is None:
            raise UnspoolError("this model came from no file, so it cannot be saved")
        check_torch()
        return load_transformer(open_checkpoint(self.path))


_CLOSED = "this model was closed; load it again: unspool.load()"


class _Shared:
    """What a session and its views have in common, and lose when one of them is closed."""

    def __init__(self, model: Loaded) -> None:
        self.model = model
        self.engine: Engine | None = None  # started by the first request
        self.finalizer: weakref.finalize[Any, Any] | None = None
        self.is_closed = False
        self.lock = threading.Lock()  # of starting and closing


class _ClosedModel:
    """In the place of a model whose memory was freed: what it was, and no more."""

    def __init__(self, model: Loaded) -> None:
        self.config, self.device = model.config, model.device

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnspoolError(_CLOSED)


def _token_bytes(vocabulary: Tokenizer | None, token: int) -> bytes:
    """A token's bytes in a text; control tokens and numbers without a piece have none."""
    if vocabulary is None or token >= len(vocabulary) or token in vocabulary.special_ids:
        return b""
    return vocabulary.token_bytes(token)
