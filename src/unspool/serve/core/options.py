"""From the parameters of an API to the options of `LanguageModel.stream`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unspool.decoding.controller import AdaptiveDrafter
from unspool.decoding.speculative import PredictedText
from unspool.engine.request import Drafter, Request
from unspool.sampling import GrammarSpec
from unspool.serve.core.schema import Constraints, SamplingRequest, biases, stops, text_biases
from unspool.serve.core.state import Call
from unspool.serve.http.errors import bad_request
from unspool.session import Session

_GRAMMARS = ("json", "json_schema", "regex", "grammar", "choice")


def sampling_options(
    lm: Session, body: SamplingRequest, *, top: int, **more: Any
) -> dict[str, Any]:
    """What completions and chats share; `more` are further options."""
    given = {name: getattr(body, name) for name in Constraints.model_fields if name != "end"}
    if (body.frequency_penalty or body.presence_penalty) and body.repetition_penalty is None:
        # OpenAI counts what was sampled, not what was given.
        given["penalize_prompt"] = given["penalize_prompt"] or False
    given |= more
    if body.stages is not None:
        given["stages"] = tuple(body.stages)
    if body.dry_sequence_breakers is not None:
        runs = [
            lm.tokenizer.encode(text)
            for text in body.dry_sequence_breakers
            if lm.tokenizer.missing_character(text) is None  # else it never occurs
        ]
        given["dry_breakers"] = [run for run in runs if run]
    options: dict[str, Any] = {"top": top, "explain": False, "stop": stops(body.stop)}
    options |= {name: value for name, value in given.items() if value is not None}
    options |= {} if body.seed is None else {"seed": body.seed}
    if body.logit_bias:
        if isinstance(body.logit_bias, list):
            options["logit_bias"] = text_biases(body.logit_bias, lm.tokenizer.encode)
        else:
            options["logit_bias"] = biases(body.logit_bias)
    options |= {} if body.end else {"end": False}
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


def read_schema(call: Call, options: dict[str, Any]) -> None:
    """A schema among the options as a grammar, with what must be said about it."""
    if options.get("json_schema") is not None:
        check_one_grammar({**options, "json_schema": None}, "a JSON schema")
        spec = GrammarSpec.json_schema(options.pop("json_schema"))
        call.note(*spec.notes)
        options["grammar"] = spec


def check_stream_options(body: Any) -> None:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream: true", "stream_options")


def check_choices(n: int, limit: int, name: str = "n") -> None:
    if n > limit:
        raise bad_request(f"{name} is {n}; this server allows at most {limit}", name)


def predicted(lm: Session, text: str) -> Any:
    """A drafter for each text that takes its guesses from what the caller expects."""
    ids = lm.tokenizer.encode(text)

    def drafter(request: Request) -> Drafter:
        return AdaptiveDrafter(PredictedText(ids, start=len(request.prompt)))

    return drafter


def finish_reason(reason: str, calls: Sequence[Any] = ()) -> str:
    """As OpenAI says it."""
    if calls and reason == "stop":
        return "tool_calls"
    return {"context": "length", "guard": "stop", "interrupted": "length"}.get(reason, reason)
