"""What prepared data is, in figures: the card that lies beside it, and in each run that used it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class DataCard:
    """Documents, tokens and bytes are those trained on; what is held out is counted apart."""

    source: list[str]
    kind: str  # "text": packed windows; "chat": a conversation in each row
    documents: int
    tokens: int
    bytes: int
    counted_tokens: int  # those that count for the loss
    held_out_documents: int
    held_out_tokens: int
    held_out_bytes: int
    duplicates: int  # documents dropped because they were there already
    empty: int  # documents dropped because they had no text
    longest: int  # tokens of the longest document
    vocab_size: int
    tokenizer: str  # its hash
    dtype: str
    seed: int

    @property
    def bytes_per_token(self) -> float:
        """How much text a token stands for, in what is trained on."""
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
        """The card as a table for people: what, how much."""
        tokens = f"{self.tokens:,}"
        if self.counted_tokens != self.tokens:
            tokens += f", of which {self.counted_tokens:,} count for the loss"
        return [
            ["source", ", ".join(self.source)],
            ["documents", f"{self.documents:,}, the longest of {self.longest:,} tokens"],
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
