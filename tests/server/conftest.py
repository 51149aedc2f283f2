"""Small models for tests of the server: the model itself proves nothing there."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

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
def http(server: Any) -> Any:
    return server.http


@pytest.fixture(scope="session")
def document(small_server: Any) -> Any:
    """The OpenAPI document, which takes a second to make."""
    return small_server.http.get("/openapi.json").json()


@pytest.fixture(scope="session")
def examples(small_server: Any) -> Any:
    """The example request of each path, as the documentation page has them."""
    page = small_server.http.get("/docs").text
    return json.loads(page.partition('id="examples">')[2].partition("</script>")[0])


@pytest.fixture(scope="session")
def openai() -> Any:
    """The package, imported when it is used: that takes a second."""
    return importlib.import_module("openai")


@pytest.fixture(scope="session")
def openai_client(openai: Any, server: Any) -> Any:
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
