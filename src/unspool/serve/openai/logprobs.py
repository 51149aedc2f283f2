"""Log-probabilities as OpenAI writes them: one way for chats, another for completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unspool.engine.steps import Candidate, Score, Step
from unspool.text.tokenizer.tokenizer import Tokenizer

LEAST = -9999.0  # OpenAI's word for "impossible": JSON has no infinity


def finite(logprob: float) -> float:
    return max(LEAST, logprob)


def spelled(piece: bytes) -> str:
    """A token's bytes as text; where they are none, as OpenAI spells such bytes."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class LogprobFormat:
    """A model's tokens, spelled."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._size = tokenizer, len(tokenizer)

    def bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token) if token < self._size else b""

    def text(self, token: int) -> str:
        return spelled(self.bytes(token))

    # -- chats -------------------------------------------------------------------------------

    def chat(self, steps: Sequence[Step], end_ids: frozenset[int], top: int) -> dict[str, Any]:
        content = [self._chat_token(step, top) for step in steps if step.token not in end_ids]
        return {"content": content, "refusal": None}

    def _chat_token(self, step: Step, top: int) -> dict[str, Any]:
        return {
            **self._weighed(step.token, step.logprob),
            "top_logprobs": [self._weighed(c.token, c.logprob) for c in step.candidates[:top]],
        }

    def _weighed(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.bytes(token)
        return {"token": spelled(piece), "logprob": finite(logprob), "bytes": list(piece)}

    # -- completions -------------------------------------------------------------------------

    def completion(self, steps: Sequence[Step], top: int, offset: int) -> dict[str, Any]:
        """Of what was written; `offset` characters stand before it."""
        found = _empty()
        for step in steps:
            self._add(found, step.token, step.logprob, step.candidates[:top], offset)
            offset += len(step.text)
        return found

    def echoed(self, score: Score, top: int) -> tuple[dict[str, Any], int]:
        """Of a prompt, and how many characters it has."""
        found, offset = _empty(), 0
        for position in score.positions:
            self._add(found, position.token, position.logprob, position.candidates[:top], offset)
            offset += len(self.bytes(position.token).decode("utf-8", "replace"))
        return found, offset

    def _add(
        self,
        found: dict[str, Any],
        token: int,
        logprob: float | None,
        candidates: Sequence[Candidate],
        offset: int,
    ) -> None:
        text = self.text(token)
        found["tokens"].append(text)
        found["token_logprobs"].append(None if logprob is None else finite(logprob))
        found["text_offset"].append(offset)
        best = {self.text(c.token): finite(c.logprob) for c in reversed(candidates)}
        if logprob is not None:
            best.setdefault(text, finite(logprob))  # the token itself is always among them
        found["top_logprobs"].append(None if logprob is None else best)


def _empty() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {name: one[name] + other[name] for name in one}
