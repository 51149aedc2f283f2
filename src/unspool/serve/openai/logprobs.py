"""Log-probabilities in OpenAI's two formats: for chats and for completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unspool.engine.steps import Candidate, Score, Step
from unspool.text.tokenizer.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # OpenAI's value for impossible tokens: JSON has no infinity


def clamp_logprob(logprob: float) -> float:
    return max(MIN_LOGPROB, logprob)


def token_text(piece: bytes) -> str:
    """A token's bytes as text; as escaped bytes, like OpenAI's, if they are not UTF-8."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class LogprobFormat:
    """Formats log-probabilities of a model's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._size = tokenizer, len(tokenizer)

    def bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token) if token < self._size else b""

    def text(self, token: int) -> str:
        return token_text(self.bytes(token))

    # -- chats -------------------------------------------------------------------------------

    def chat(self, steps: Sequence[Step], end_ids: frozenset[int], top: int) -> dict[str, Any]:
        content = [self._chat_token(step, top) for step in steps if step.token not in end_ids]
        return {"content": content, "refusal": None}

    def _chat_token(self, step: Step, top: int) -> dict[str, Any]:
        return {
            **self._token_json(step.token, step.logprob),
            "top_logprobs": [self._token_json(c.token, c.logprob) for c in step.candidates[:top]],
        }

    def _token_json(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.bytes(token)
        return {"token": token_text(piece), "logprob": clamp_logprob(logprob), "bytes": list(piece)}

    # -- completions -------------------------------------------------------------------------

    def completion(self, steps: Sequence[Step], top: int, offset: int) -> dict[str, Any]:
        """Of generated steps; `offset` characters precede them."""
        logprobs = _empty()
        for step in steps:
            self._add(logprobs, step.token, step.logprob, step.candidates[:top], offset)
            offset += len(step.text)
        return logprobs

    def echoed(self, score: Score, top: int) -> tuple[dict[str, Any], int]:
        """Of a prompt, and its number of characters."""
        logprobs, offset = _empty(), 0
        for position in score.positions:
            self._add(logprobs, position.token, position.logprob, position.candidates[:top], offset)
            offset += len(self.bytes(position.token).decode("utf-8", "replace"))
        return logprobs, offset

    def _add(
        self,
        logprobs: dict[str, Any],
        token: int,
        logprob: float | None,
        candidates: Sequence[Candidate],
        offset: int,
    ) -> None:
        text = self.text(token)
        logprobs["tokens"].append(text)
        logprobs["token_logprobs"].append(None if logprob is None else clamp_logprob(logprob))
        logprobs["text_offset"].append(offset)
        best = {self.text(c.token): clamp_logprob(c.logprob) for c in reversed(candidates)}
        if logprob is not None:
            best.setdefault(text, clamp_logprob(logprob))  # always has the token itself
        logprobs["top_logprobs"].append(None if logprob is None else best)


def _empty() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def join_logprobs(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {name: first[name] + second[name] for name in first}
