"""Small models for tests of the server: the model itself proves nothing there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import unspool
from helpers.tree_client import Tree
from helpers.word_model import save_chatty
from unspool.server.runtime.registry import ModelEntry


@pytest.fixture(scope="session")
def lm(small_lm: Any) -> Any:
    return small_lm


@pytest.fixture(scope="session")
def server(small_server: Any) -> Any:
    return small_server


@pytest.fixture(scope="session")
def http(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def openai_client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def tree(server: Any) -> Tree:
    return Tree(server.url)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model with a vocabulary of words and a chat template."""
    return save_chatty(tmp_path_factory.mktemp("small-model"))


@pytest.fixture(scope="session")
def small_entry(small_model: Path) -> ModelEntry:
    return ModelEntry("small", lambda: unspool.load(small_model, memory=8 << 20, threads=1), 1000)
