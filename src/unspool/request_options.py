"""What a caller may ask of a generation, read into one `Request`.

All options are checked here, before anything runs: an unknown name, an impossible number, a schema
that is none.
"""

from __future__ import annotations

import operator
import reprlib
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from unspool.engine.ending import Limits
from unspool.engine.endless import kept_tokens
from unspool.engine.generation import Generation
from unspool.engine.options import NAMES
from unspool.engine.request import Drafter, DraftMaker, Request
from unspool.engine.thinking import CALL, Thinking
from unspool.errors import SettingsError, UnspoolWarning, check_bool
from unspool.sampling import Grammar, GrammarSpec, GrammarVocabulary, SamplingSettings
from unspool.sampling.guards import GuardPolicy
from unspool.sampling.settings import MIROSTAT_STAGES

_LIMITS = ("max_tokens", "sample", "top")
_KEPT = {
    *_LIMITS,
    "explain",
    "end",
    "priority",
    "cache",
    "endless",
    "thoughts",
    "seed",
}  # as they were, where None is given
_GRAMMARS: dict[str, Callable[[Any], GrammarSpec]] = {
    "json": lambda wanted: GrammarSpec.json(),
    "json_schema": GrammarSpec.json_schema,
    "regex": GrammarSpec.regex,
    "choice": GrammarSpec.choice,
    "grammar": lambda text: text if isinstance(text, GrammarSpec) else _written_grammar(text),
}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What must be known of a model to check what is asked of it."""

    context: int
    end_ids: frozenset[int]
    vocab_size: int
    grammar_vocabulary: Callable[[], GrammarVocabulary]  # made when the first grammar is used
    drafter: Callable[[Any], Drafter | DraftMaker | None]  # from what was given as `speculate`
    single_token: Callable[[str], int]  # the id of a text that is one token
    adapter: str | None = None  # what it writes with where a text names none
    thinking: Callable[[Sequence[int]], Thinking | None] = lambda prompt: None


def strings(value: str | Sequence[str] | None, name: str = "stop") -> tuple[str, ...]:
    """The strings of an option that takes one, several or none."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise SettingsError(f"{name} must be a string or a list of strings, got {value!r}")
    return tuple(value)


def given_ids(prompt: Any) -> list[int]:
    """Token ids from a caller, who may have given something else."""
    if isinstance(prompt, bytes | bytearray):
        raise SettingsError(f"the prompt is {prompt[:40]!r}; make it text: prompt.decode()")
    try:
        items = list(prompt)
    except TypeError:
        raise SettingsError(
            f"the prompt is {reprlib.repr(prompt)}; it may be text, token ids, or (for generate "
            "and chat) a list of prompts"
        ) from None
    try:
        return [operator.index(item) for item in items]
    except TypeError:
        if any(isinstance(item, Mapping) for item in items):
            raise SettingsError(
                "the prompt is a list of messages; write lm.chat(messages)"
            ) from None
        raise SettingsError(
            f"the prompt is {reprlib.repr(prompt)}; here it may be one text, or one list of token "
            "ids (generate and chat also take a list of prompts)"
        ) from None


def several(given: Any) -> list[Any] | None:
    """The prompts or conversations of a list of them; None for a single one.

    A list of whole numbers is one prompt, and a list of messages one conversation.
    """
    if isinstance(given, str | bytes | Mapping):
        return None
    try:
        items = list(given)
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
    """Whether this is a list of messages."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


_USUAL = SamplingSettings()


def build_request(model: ModelFacts, prompt: Sequence[int], options: dict[str, Any]) -> Request:
    """A request from a caller's options (`Options`); None is as good as not given."""
    _check_names(options)
    given = {name: value for name, value in options.items() if value is not None}
    seed = given.pop("seed", None)
    end = check_bool("end", given.pop("end", True))
    limits = Limits(
        max_tokens=_whole("max_tokens", given.pop("max_tokens", 256)),
        context=model.context,
        end_ids=model.end_ids if end else frozenset(),
        stop=strings(given.pop("stop", ())),
        sample=_whole("sample", given.pop("sample", 0)),
        top=_whole("top", given.pop("top", 0)),
        explain=check_bool("explain", given.pop("explain", False)),
        endless=kept_tokens(given.pop("endless", None), len(prompt), model.context),
    )
    request = Request(
        prompt=tuple(prompt),
        settings=_USUAL,  # until the rest is checked
        limits=limits,
        priority=_priority(given.pop("priority", 0)),
        adapter=_adapter(given.pop("adapter", model.adapter)),
        cached=check_bool("cache", given.pop("cache", True)),
        guards=_guards(given.pop("guard", None)),
        grammar=_grammar(model, given),
        thinking=_thinking(model, prompt, given),
        drafter=None,
    )
    speculate = given.pop("speculate", None)
    settings = _settings(model, seed=secrets.randbits(32) if seed is None else seed, **given)
    request = replace(request, settings=settings)
    return replace(request, drafter=model.drafter(speculate)) if speculate else request


def check_options(options: dict[str, Any]) -> None:
    """Refuse what no model could do, before one is loaded; what depends on the model comes later.

    Options are those of `LanguageModel.stream`.
    """
    given = dict(options)
    if _names_tokens(given.get("grammar")):
        del given["grammar"]
    many = 1 << 62
    any_model = ModelFacts(many, frozenset(), many, _bytes_alone, lambda _: None, lambda _: 0)
    with warnings.catch_warnings(action="ignore"):  # they come again when it is really asked for
        build_request(any_model, (0,), given)


def _names_tokens(grammar: Any) -> bool:
    """Whether a grammar names control tokens (`<|tool|>`), which only a model can have."""
    return isinstance(grammar, str) and "<|" in grammar


def _bytes_alone() -> GrammarVocabulary:
    """A vocabulary in which any text can be written."""
    return GrammarVocabulary([bytes([value]) for value in range(256)], ())


def continued_request(
    model: ModelFacts, generation: Generation, options: dict[str, Any]
) -> Request:
    """The request that continues a generation: its own request, changed by these options.

    `max_tokens` counts new tokens. Without it the text may grow to the length that its last request
    allowed; a text that has that length gets as many new tokens as its last request did. An option
    of sampling, guards or grammars that is None has its default again.
    """
    _check_names(options)
    before = generation.request
    given = {n: v for n, v in options.items() if v is not None or n not in _KEPT}
    changed: dict[str, Any] = {n: _whole(n, given.pop(n)) for n in _LIMITS if n in given}
    if "explain" in given:
        changed["explain"] = check_bool("explain", given.pop("explain"))
    if "stop" in given:
        changed["stop"] = strings(given.pop("stop"))
    if "end" in given:
        changed["end_ids"] = model.end_ids if check_bool("end", given.pop("end")) else frozenset()
    if "endless" in given:
        asked, length = given.pop("endless"), len(generation.prompt)
        changed["endless"] = kept_tokens(asked, length, before.limits.context)
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
        priority=_priority(given.pop("priority", before.priority)),
    )
    if "adapter" in given:
        request = replace(request, adapter=_adapter(given.pop("adapter") or model.adapter))
    if "cache" in given:
        request = replace(request, cached=check_bool("cache", given.pop("cache")))
    if "guard" in given:
        request = replace(request, guards=_guards(given.pop("guard")))
    if "thoughts" in given:
        request = replace(request, thinking=_thinking(model, before.prompt, given))
    elif "think_budget" in given:
        budget = given.pop("think_budget")
        if before.thinking is not None:
            budget = None if budget is None else _whole("think_budget", budget)
            request = replace(request, thinking=replace(before.thinking, budget=budget))
    if any(name in given for name in _GRAMMARS):
        request = replace(request, grammar=_grammar(model, given))
    if "speculate" in given:
        speculate = given.pop("speculate")
        request = replace(request, drafter=model.drafter(speculate) if speculate else None)
    if given:
        wanted = {**_set_before(before.settings), **given}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        request = replace(request, settings=_settings(model, **wanted))
    return request


def _check_names(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name not in NAMES:
            from unspool.engine.option_names import unknown_option  # rarely needed

            raise unknown_option(name, value)


def _set_before(settings: SamplingSettings) -> dict[str, Any]:
    """What is not at its usual value, as a caller would give it."""
    found = {f.name: getattr(settings, f.name) for f in fields(settings)}
    if found["stages"] == MIROSTAT_STAGES:  # they followed from mirostat being on
        del found["stages"]
    return {name: value for name, value in found.items() if value != getattr(_USUAL, name)}


def _settings(model: ModelFacts, **options: Any) -> SamplingSettings:
    bias = options.get("logit_bias")
    if isinstance(bias, Mapping):
        options["logit_bias"] = _bias_by_id(model, bias)
    return SamplingSettings.from_options(**options)


def _bias_by_id(model: ModelFacts, given: Mapping[Any, Any]) -> dict[Any, Any]:
    """A bias with token ids for those tokens that were given as text."""
    found: dict[Any, Any] = {}
    for key, amount in given.items():
        token = model.single_token(key) if isinstance(key, str) else key
        if token in found:
            raise SettingsError(f"logit_bias names token {token} twice, the second time as {key!r}")
        if isinstance(token, int) and token >= model.vocab_size:
            raise SettingsError(
                f"logit_bias names token {token}, and the vocabulary goes from 0 to "
                f"{model.vocab_size - 1}"
            )
        found[token] = amount
    return found


def _whole(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SettingsError(f"{name} is {value!r}; it may be a whole number from 0 up")
    return value


def _priority(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise SettingsError(f"priority is {value!r}; it may be a whole number, higher goes first")
    return value


def _adapter(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise SettingsError(f"adapter is {value!r}; it may be the name of a loaded adapter")
    return value or None


def _guards(given: Any) -> GuardPolicy | None:
    if given is None or isinstance(given, GuardPolicy):
        return given
    return GuardPolicy.parse(strings(given, "guard"))


def _grammar(model: ModelFacts, given: dict[str, Any]) -> Grammar | None:
    """The one grammar that was asked for, compiled; takes its options out of `given`."""
    asked = {name: given.pop(name) for name in _GRAMMARS if name in given}
    asked = {
        name: value for name, value in asked.items() if value is not None and value is not False
    }
    if not asked:
        return None
    if len(asked) > 1:
        raise SettingsError(f"{' and '.join(asked)} were given; a text can obey only one of them")
    ((name, value),) = asked.items()
    if name == "json":
        check_bool("json", value)
    spec = _GRAMMARS[name](value)
    if value is not spec:  # who made the spec has its notes
        for note in spec.notes:
            warnings.warn(note, UnspoolWarning, stacklevel=2)
    return Grammar.compile(spec, model.grammar_vocabulary())


def _thinking(model: ModelFacts, prompt: Sequence[int], given: dict[str, Any]) -> Thinking | None:
    """Where the thoughts of an answer are, and how long they may be."""
    wanted, budget = given.pop("thoughts", False), given.pop("think_budget", None)
    if budget is not None:
        budget = _whole("think_budget", budget)
    found = model.thinking(prompt) if wanted or budget is not None else None
    if found is None:
        return None
    if budget == 0 and found.start.place == "behind":
        budget = None  # the prompt has closed the thought already
    return replace(found, budget=budget, is_call=wanted == CALL)


def _written_grammar(text: Any) -> GrammarSpec:
    """GBNF says `root ::=`, Lark says `start:`."""
    if not isinstance(text, str):
        raise SettingsError(f"grammar was {text!r}; it may be the text of a Lark or GBNF grammar")
    return GrammarSpec.gbnf(text) if "::=" in text else GrammarSpec.lark(text)
