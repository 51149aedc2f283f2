"""Statistics of prepared data, kept beside it and in each run that used it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class DataCard:
    """Statistics of one prepared data set; `held_out_*` fields describe the evaluation split."""

    source: list[str]
    kind: str  # "text": packed windows; "chat": one conversation per row
    documents: int
    tokens: int
    bytes: int
    counted_tokens: int  # tokens in the loss
    held_out_documents: int
    held_out_tokens: int
    held_out_bytes: int
    duplicates: int  # documents dropped as duplicates
    empty: int  # documents dropped as empty
    longest: int  # tokens of the longest document
    vocab_size: int
    tokenizer: str  # hash of its files
    dtype: str
    seed: int

    @property
    def bytes_per_token(self) -> float:
        """Average UTF-8 bytes per token in the training split."""
        return self.bytes / max(1, self.tokens)

    @property
    def held_out_bytes_per_token(self) -> float:
        return self.held_out_bytes / max(1, self.held_out_tokens)

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "bytes_per_token": round(self.bytes_per_token, 4),
            "held_out_bytes_per_token": round(self.held_out_bytes_per_token, 4),
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> DataCard:
        return cls(**{name: content[name] for name in cls.__dataclass_fields__})

    def rows(self) -> list[list[str]]:
        """The statistics as (label, text) rows for display."""
        tokens = f"{self.tokens:,}"
        if self.counted_tokens != self.tokens:
            tokens += f", {self.counted_tokens:,} of them in the loss"
        return [
            ["source", ", ".join(self.source)],
            ["documents", f"{self.documents:,}, the longest has {self.longest:,} tokens"],
            ["tokens", tokens],
            ["bytes", f"{self.bytes:,}"],
            ["bytes per token", f"{self.bytes_per_token:.2f}"],
            [
                "held out",
                f"{self.held_out_documents:,} documents, {self.held_out_tokens:,} tokens,"
                f" {self.held_out_bytes_per_token:.2f} bytes per token",
            ],
            ["dropped", f"{self.duplicates:,} duplicates, {self.empty:,} empty"],
            ["vocabulary", f"{self.vocab_size:,} tokens, stored as {self.dtype}"],
        ]
