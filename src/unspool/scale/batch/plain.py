"""Rows with a `prompt` or `messages`, written by the engine directly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unspool.engine.generation import Generation
from unspool.engine.option_names import unknown_option
from unspool.engine.options import NAMES
from unspool.errors import DataError
from unspool.request_options import strings
from unspool.scale.batch.rows import Row
from unspool.scale.batch.settings import BatchSettings, row_seed
from unspool.session import Session

_OWN = ("id", "prompt", "messages", "think")


def draft_of(lm: Session, row: Row, settings: BatchSettings) -> Generation:
    """A row as a text to be written; UnspoolError says what is wrong with it."""
    given = {name: value for name, value in row.given.items() if name not in settings.carry}
    for name in given:
        if name not in _OWN and name not in NAMES:
            unknown = unknown_option(name, given[name])
            raise DataError(f"{unknown} (--carry {name} keeps it in the answers)")
    own = {name: value for name, value in given.items() if name in NAMES and value is not None}
    seed = row_seed(settings.seed, row.key)
    options: dict[str, Any] = {"seed": seed, **settings.options, **own}
    messages = _messages(lm, row.given, settings)
    if messages is None:
        return lm.draft(row.given["prompt"], **options)
    options["stop"] = strings(options.get("stop")) + lm.chat_template.stops
    think = given.get("think")
    told = lm.think_options(settings.think if think is None else think, options)
    return lm.draft(lm.chat_prompt(messages, **told).ids, **options)


def _messages(
    lm: Session, given: Mapping[str, Any], settings: BatchSettings
) -> Sequence[Mapping[str, Any]] | None:
    """The conversation that is to be answered; None: the prompt is to be continued."""
    prompt, messages = given.get("prompt"), given.get("messages")
    if (prompt is None) == (messages is None):
        told = "neither prompt nor messages" if prompt is None else "both prompt and messages"
        raise DataError(f"the row has {told}; give one of them")
    if messages is None:
        is_chat = lm.is_instruct if settings.chat is None else settings.chat
        if not is_chat or not isinstance(prompt, str):  # token ids are continued as they are
            return None
        messages = [{"role": "user", "content": prompt}]
    elif isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    elif not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise DataError("messages may be a question, or a list of {'role', 'content'}")
    if settings.system is not None and not any(one.get("role") == "system" for one in messages):
        messages = [{"role": "system", "content": settings.system}, *messages]
    return messages


def answer_of(row: Row, generation: Generation, carry: Sequence[str]) -> dict[str, Any]:
    """A written row, as the output has it."""
    kept = {name: row.given[name] for name in carry if name in row.given}
    reasoning = {"reasoning": generation.reasoning} if generation.reasoning else {}
    return {
        **kept,
        "id": row.id,
        "text": generation.answer,
        **reasoning,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": len(generation.prompt),
        "completion_tokens": len(generation.steps),
        "seed": generation.seed,
    }
