"""The APIs that are imported when one of their paths is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import APIRouter


@dataclass(frozen=True, slots=True)
class Later:
    """Paths by their beginnings, and the routers that have them."""

    paths: tuple[str, ...]
    routers: Callable[[], list[APIRouter]]


def _responses() -> list[APIRouter]:
    from unspool.serve.openai import responses

    return [responses.router]


def _messages() -> list[APIRouter]:
    from unspool.serve.anthropic import messages

    return [messages.router]


def _embeddings() -> list[APIRouter]:
    from unspool.serve.openai import embeddings

    return [embeddings.router]


def _ollama() -> list[APIRouter]:
    from unspool.serve.ollama import embed, models, writing

    return [writing.router, embed.router, models.router]


def _llamacpp() -> list[APIRouter]:
    from unspool.serve.llamacpp import completion, embedding, infill

    return [completion.router, infill.router, embedding.router]


def _tokens() -> list[APIRouter]:
    from unspool.serve import tokens

    return [tokens.router]


def _tree() -> list[APIRouter]:
    from unspool.serve.tree import endpoints

    return [endpoints.router]


def _diffuse() -> list[APIRouter]:
    from unspool.serve import diffuse

    return [diffuse.router]


def _puzzles() -> list[APIRouter]:
    from unspool.serve import puzzles

    return [puzzles.router]


def _think() -> list[APIRouter]:
    from unspool.serve import think

    return [think.router]


def _costs() -> list[APIRouter]:
    from unspool.serve import costs

    return [costs.router]


def _runs() -> list[APIRouter]:
    from unspool.serve.runs import endpoints

    return [endpoints.router]


LATER = (  # in this order at /docs
    Later(("/v1/responses", "/responses"), _responses),
    Later(("/v1/messages",), _messages),
    Later(("/v1/embeddings",), _embeddings),
    Later(("/v1/tree",), _tree),
    Later(("/v1/diffuse",), _diffuse),
    Later(("/v1/puzzles",), _puzzles),
    Later(("/v1/think",), _think),
    Later(("/v1/costs",), _costs),
    Later(("/v1/runs",), _runs),
    Later(
        ("/tokenize", "/detokenize", "/vocabularies", "/apply-template", "/score"),
        _tokens,
    ),
    Later(("/api/",), _ollama),
    Later(
        (
            "/completion",
            "/infill",
            "/embedding",
            "/rerank",
            "/v1/rerank",
            "/lora-adapters",
            "/props",
            "/slots",
        ),
        _llamacpp,
    ),
)
