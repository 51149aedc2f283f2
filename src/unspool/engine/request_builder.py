"""Checks the options of a generation and builds its `Request`.

All options are checked here, before anything runs: unknown names, numbers out of range, invalid
schemas.
"""

from __future__ import annotations

import operator
import os
import reprlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from unspool.backends.interventions import Intervention, as_interventions
from unspool.engine.generation import Generation
from unspool.engine.reasoning import CALL, ReasoningSpec
from unspool.engine.request import NAMES, Drafter, DraftMaker, Limits, Request, parse_endless
from unspool.errors import SettingsError, UnspoolWarning, check_bool
from unspool.sampling import Grammar, GrammarSpec, GrammarVocabulary, SamplingSettings
from unspool.sampling.guards import GuardPolicy
from unspool.sampling.settings import MIROSTAT_STAGES

_LIMITS = ("max_tokens", "sample", "top")
_UNCHANGED_BY_NONE = {
    *_LIMITS,
    "explain",
    "end",
    "priority",
    "cache",
    "endless",
    "thoughts",
    "seed",
}  # when a text is resumed; other options return to their default
_GRAMMARS: dict[str, Callable[[Any], GrammarSpec]] = {
    "json": lambda value: GrammarSpec.json(),
    "json_schema": GrammarSpec.json_schema,
    "regex": GrammarSpec.regex,
    "choice": GrammarSpec.choice,
    "grammar": lambda text: text if isinstance(text, GrammarSpec) else _parse_grammar(text),
}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model tells the checks of its options."""

    context: int
    end_ids: frozenset[int]
    vocab_size: int
    grammar_vocabulary: Callable[[], GrammarVocabulary]  # built for the first grammar
    drafter: Callable[[Any], Drafter | DraftMaker | None]  # from the option `speculate`
    single_token: Callable[[str], int]  # the id of a text that is one token
    adapter: str | None = None  # the default adapter
    thinking: Callable[[Sequence[int]], ReasoningSpec | None] = lambda prompt: None
    # Raises SettingsError if the model cannot apply these interventions.
    check_interventions: Callable[[Sequence[Intervention]], None] = lambda interventions: None
    # The interventions of an option `steer`.
    parse_steering: Callable[[Any], tuple[Intervention, ...]] = lambda steer: ()


def as_strings(value: str | Sequence[str] | None, name: str = "stop") -> tuple[str, ...]:
    """Return the strings of an option that takes one, several or none."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise SettingsError(f"{name} must be a string or a list of strings, got {value!r}")
    return tuple(value)


def parse_prompt_ids(prompt: Any) -> list[int]:
    """Return the token ids of a prompt; raise SettingsError if it is something else."""
    if isinstance(prompt, bytes | bytearray):
        raise SettingsError(
            f"prompt must be text or token ids, got bytes {prompt[:40]!r}; use prompt.decode()"
        )
    try:
        items = list(prompt)
    except TypeError:
        raise SettingsError(
            "prompt must be text, token ids, or (for generate and chat) a list of prompts, got "
            f"{reprlib.repr(prompt)}"
        ) from None
    try:
        return list(map(operator.index, items))
    except TypeError:
        if any(isinstance(item, Mapping) for item in items):
            raise SettingsError("the prompt is a list of messages; use lm.chat(messages)") from None
        raise SettingsError(
            "prompt must be one text, or one list of token ids (generate and chat also take a list "
            f"of prompts), got {reprlib.repr(prompt)}"
        ) from None


def split_batch(value: Any) -> list[Any] | None:
    """Return the items of a list of prompts or conversations; None for a single one.

    A list of integers is one prompt, and a list of messages one conversation.
    """
    if isinstance(value, str | bytes | Mapping):
        return None
    try:
        items = list(value)
    except TypeError:
        return None
    if not items or isinstance(items[0], Mapping):
        return None
    try:
        operator.index(items[0])
    except TypeError:
        return items
    return None


def is_conversation(prompt: Any) -> bool:
    """Return whether this is a list of messages."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


_DEFAULTS = SamplingSettings()


def build_request(model: ModelFacts, prompt: Sequence[int], options: dict[str, Any]) -> Request:
    """Build a request from a caller's options (`Options`); None means the default."""
    _check_names(options)
    remaining = {name: value for name, value in options.items() if value is not None}
    seed = remaining.pop("seed", None)
    end = check_bool("end", remaining.pop("end", True))
    limits = Limits(
        max_tokens=_non_negative("max_tokens", remaining.pop("max_tokens", 256)),
        context=model.context,
        end_ids=model.end_ids if end else frozenset(),
        stop=as_strings(remaining.pop("stop", ())),
        sample=_non_negative("sample", remaining.pop("sample", 0)),
        top=_non_negative("top", remaining.pop("top", 0)),
        explain=check_bool("explain", remaining.pop("explain", False)),
        endless=parse_endless(remaining.pop("endless", None), len(prompt), model.context),
    )
    request = Request(
        prompt=tuple(prompt),
        settings=_DEFAULTS,  # set below, when all other options are taken out
        limits=limits,
        priority=_priority(remaining.pop("priority", 0)),
        adapter=_adapter(remaining.pop("adapter", model.adapter)),
        interventions=_interventions(model, remaining),
        cached=check_bool("cache", remaining.pop("cache", True)),
        guards=_guards(remaining.pop("guard", None)),
        grammar=_grammar(model, remaining),
        thinking=_thinking(model, prompt, remaining),
        drafter=None,
    )
    speculate = remaining.pop("speculate", None)
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
    settings = _settings(model, seed=seed, **remaining)
    request = replace(request, settings=settings)
    return replace(request, drafter=model.drafter(speculate)) if speculate else request


def check_options(options: dict[str, Any]) -> None:
    """Check options without a model; what depends on the model is checked later.

    Options are those of `LanguageModel.stream`.
    """
    remaining = dict(options)
    if _names_tokens(remaining.get("grammar")):
        del remaining["grammar"]
    no_limit = 1 << 62
    any_model = ModelFacts(
        no_limit, frozenset(), no_limit, _byte_vocabulary, lambda _: None, lambda _: 0
    )
    with warnings.catch_warnings(action="ignore"):  # they are repeated for the real request
        build_request(any_model, (0,), remaining)


def _names_tokens(grammar: Any) -> bool:
    """Return whether a grammar names control tokens (`<|tool|>`), which depend on the model."""
    return isinstance(grammar, str) and "<|" in grammar


def _byte_vocabulary() -> GrammarVocabulary:
    """Return a vocabulary of single bytes, which can encode any text."""
    return GrammarVocabulary([bytes([value]) for value in range(256)], ())


def continued_request(
    model: ModelFacts, generation: Generation, options: dict[str, Any]
) -> Request:
    """Build the request that continues a generation: its own request, changed by these options.

    `max_tokens` counts new tokens. Without it the text may grow to the length that its last request
    allowed; a text that has that length gets as many new tokens as its last request did. An option
    of sampling, guards or grammars that is None returns to its default.
    """
    _check_names(options)
    before = generation.request
    remaining = {n: v for n, v in options.items() if v is not None or n not in _UNCHANGED_BY_NONE}
    changed: dict[str, Any] = {
        n: _non_negative(n, remaining.pop(n)) for n in _LIMITS if n in remaining
    }
    if "explain" in remaining:
        changed["explain"] = check_bool("explain", remaining.pop("explain"))
    if "stop" in remaining:
        changed["stop"] = as_strings(remaining.pop("stop"))
    if "end" in remaining:
        changed["end_ids"] = (
            model.end_ids if check_bool("end", remaining.pop("end")) else frozenset()
        )
    if "endless" in remaining:
        endless, length = remaining.pop("endless"), len(generation.prompt)
        changed["endless"] = parse_endless(endless, length, before.limits.context)
    num_written = len(generation.steps)
    if "max_tokens" in changed:
        changed["max_tokens"] += num_written
    elif num_written >= before.limits.max_tokens:  # the limit is reached: as many tokens again
        last_max_tokens = before.limits.max_tokens - len(before.written)
        changed["max_tokens"] = num_written + max(last_max_tokens, 0)
    request = replace(
        before,
        limits=replace(before.limits, **changed),
        written=tuple(generation.steps),
        priority=_priority(remaining.pop("priority", before.priority)),
    )
    if "adapter" in remaining:
        request = replace(request, adapter=_adapter(remaining.pop("adapter") or model.adapter))
    if "interventions" in remaining or "steer" in remaining:
        request = replace(request, interventions=_interventions(model, remaining))
    if "cache" in remaining:
        request = replace(request, cached=check_bool("cache", remaining.pop("cache")))
    if "guard" in remaining:
        request = replace(request, guards=_guards(remaining.pop("guard")))
    if "thoughts" in remaining:
        request = replace(request, thinking=_thinking(model, before.prompt, remaining))
    elif "think_budget" in remaining:
        budget = remaining.pop("think_budget")
        if before.thinking is not None:
            budget = None if budget is None else _non_negative("think_budget", budget)
            request = replace(request, thinking=replace(before.thinking, budget=budget))
    if any(name in remaining for name in _GRAMMARS):
        request = replace(request, grammar=_grammar(model, remaining))
    if "speculate" in remaining:
        speculate = remaining.pop("speculate")
        request = replace(request, drafter=model.drafter(speculate) if speculate else None)
    if remaining:
        sampling = {**_non_defaults(before.settings), **remaining}
        sampling = {name: value for name, value in sampling.items() if value is not None}
        request = replace(request, settings=_settings(model, **sampling))
    return request


def _check_names(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name not in NAMES:
            from unspool.engine.request import unknown_option  # rarely needed

            raise unknown_option(name, value)


def _non_defaults(settings: SamplingSettings) -> dict[str, Any]:
    """Return the options that differ from their defaults, as a caller would give them."""
    values = {f.name: getattr(settings, f.name) for f in fields(settings)}
    if values["stages"] == MIROSTAT_STAGES:  # they follow from mirostat being on
        del values["stages"]
    return {name: value for name, value in values.items() if value != getattr(_DEFAULTS, name)}


def _settings(model: ModelFacts, **options: Any) -> SamplingSettings:
    bias = options.get("logit_bias")
    if isinstance(bias, Mapping):
        options["logit_bias"] = _bias_by_id(model, bias)
    return SamplingSettings.from_options(**options)


def _bias_by_id(model: ModelFacts, bias: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a logit bias by token id; keys may be ids or texts of one token."""
    by_id: dict[Any, Any] = {}
    for key, amount in bias.items():
        token = model.single_token(key) if isinstance(key, str) else key
        if token in by_id:
            raise SettingsError(f"logit_bias names token {token} twice, the second time as {key!r}")
        if isinstance(token, int) and token >= model.vocab_size:
            raise SettingsError(
                f"logit_bias names token {token}, and the vocabulary goes from 0 to "
                f"{model.vocab_size - 1}"
            )
        by_id[token] = amount
    return by_id


def _non_negative(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SettingsError(f"{name} must be an integer >= 0, got {value!r}")
    return value


def _priority(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise SettingsError(f"priority must be an integer (higher goes first), got {value!r}")
    return value


def _adapter(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise SettingsError(f"adapter must be the name of a loaded adapter, got {value!r}")
    return value or None


def _interventions(model: ModelFacts, remaining: dict[str, Any]) -> tuple[Intervention, ...]:
    """Return all changes inside the model; removes their options from `remaining`."""
    interventions = (
        *as_interventions(remaining.pop("interventions", None)),
        *model.parse_steering(remaining.pop("steer", None)),
    )
    if interventions:
        model.check_interventions(interventions)
    return interventions


def _guards(value: Any) -> GuardPolicy | None:
    if value is None or isinstance(value, GuardPolicy):
        return value
    return GuardPolicy.parse(as_strings(value, "guard"))


def _grammar(model: ModelFacts, remaining: dict[str, Any]) -> Grammar | None:
    """Compile the grammar, if there is one; removes its options from `remaining`."""
    grammars = {name: remaining.pop(name) for name in _GRAMMARS if name in remaining}
    grammars = {
        name: value for name, value in grammars.items() if value is not None and value is not False
    }
    if not grammars:
        return None
    if len(grammars) > 1:
        raise SettingsError(f"{' and '.join(grammars)} were given; use only one of them")
    ((name, value),) = grammars.items()
    if name == "json":
        check_bool("json", value)
    spec = _GRAMMARS[name](value)
    if value is not spec:  # a caller who built the spec has its notes already
        for note in spec.notes:
            warnings.warn(note, UnspoolWarning, stacklevel=2)
    return Grammar.compile(spec, model.grammar_vocabulary())


def _thinking(
    model: ModelFacts, prompt: Sequence[int], remaining: dict[str, Any]
) -> ReasoningSpec | None:
    """Return how the answer contains reasoning, and its budget; None: it has no reasoning."""
    option, budget = remaining.pop("thoughts", False), remaining.pop("think_budget", None)
    if budget is not None:
        budget = _non_negative("think_budget", budget)
    thinking = model.thinking(prompt) if option or budget is not None else None
    if thinking is None:
        return None
    if budget == 0 and thinking.start.state == "behind":
        budget = None  # the prompt has ended the reasoning already
    return replace(thinking, budget=budget, is_call=option == CALL)


def _parse_grammar(text: Any) -> GrammarSpec:
    """Parse a Lark grammar (`start:`) or a GBNF grammar (`root ::=`)."""
    if not isinstance(text, str):
        raise SettingsError(f"grammar must be the text of a Lark or GBNF grammar, got {text!r}")
    return GrammarSpec.gbnf(text) if "::=" in text else GrammarSpec.lark(text)
