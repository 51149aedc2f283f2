"""From the parameters of an API to the options of `LanguageModel.stream`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unspool.decoding.adaptive import Adaptive
from unspool.decoding.draft_corpus import Corpus, PredictedText
from unspool.engine.request import Drafter, Request
from unspool.serve.core.schema import SamplingRequest, biases, stops
from unspool.serve.http.errors import bad_request
from unspool.session import Session

_GRAMMARS = ("json", "json_schema", "regex", "grammar", "choice")


def sampling_options(body: SamplingRequest, *, top: int, **more: Any) -> dict[str, Any]:
    """What completions and chats share; `more` are further options."""
    penalized = body.frequency_penalty or body.presence_penalty
    given = dict(
        temperature=body.temperature,
        top_p=body.top_p,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        # OpenAI counts what was sampled, not what was given.
        penalize_prompt=False if penalized else None,
        seed=body.seed,
        logit_bias=biases(body.logit_bias) if body.logit_bias else None,
        **more,
    )
    options: dict[str, Any] = {"top": top, "explain": False, "stop": stops(body.stop)}
    options |= {name: value for name, value in given.items() if value is not None}
    if body.unspool is None:
        return options
    own = body.unspool.options()
    twice = sorted({*own} & {*options} - {"top", "explain", "penalize_prompt"})
    if twice:
        raise bad_request(f"{twice[0]} is given twice, also under unspool", f"unspool.{twice[0]}")
    if "top" in own:
        own["top"] = max(own["top"], options["top"])
    return options | own


def check_one_grammar(options: dict[str, Any], because: str) -> None:
    """Something else already decides what the text may be."""
    for name in _GRAMMARS:
        if options.get(name):
            raise bad_request(f"{name} cannot be combined with {because}")


def strict_schema(schema: Any, strict: bool | None) -> Any:
    """A schema under `strict`: its objects have the properties that it names and no others.

    OpenAI insists that a strict schema says so itself; here, one that does not say is read so.
    """
    if not strict:
        return schema
    if isinstance(schema, list):
        return [strict_schema(item, True) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: strict_schema(value, True) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        found.setdefault("additionalProperties", False)
    return found


def check_stream_options(body: Any) -> None:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream: true", "stream_options")


def check_choices(n: int, limit: int, name: str = "n") -> None:
    if n > limit:
        raise bad_request(f"{name} is {n}; this server allows at most {limit}", name)


def predicted(lm: Session, text: str) -> Any:
    """A drafter for each text that takes its guesses from what the caller expects."""
    ids = lm.tokenizer.encode(text)
    corpus = Corpus([ids])

    def drafter(request: Request) -> Drafter:
        return Adaptive(PredictedText(corpus, ids, start=len(request.prompt)))

    return drafter


def finish_reason(reason: str, calls: Sequence[Any] = ()) -> str:
    """As OpenAI says it."""
    if calls and reason == "stop":
        return "tool_calls"
    return {"context": "length", "guard": "stop", "interrupted": "length"}.get(reason, reason)
