"""The documentation site: it builds without warnings, is complete, and its search gives answers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "site"))

import unspool  # noqa: E402

# Questions as people type them, and the pages that answer them: one must be in the first three.
QUESTIONS = {
    "how do I get logprobs for a prompt": ["how-to/get-logprobs"],
    "how do I load my LoRA": ["how-to/use-lora-adapters"],
    "is it deterministic on GPU": ["explanation/determinism"],
    "OpenAI compatible server": ["tutorials/serve"],
    "structured output json schema": ["how-to/structured-output"],
    "how much memory do I need": ["how-to/choose-a-model", "explanation/memory"],
    "speculative decoding": ["how-to/speculative-decoding"],
    "fine-tune on my data": ["how-to/fine-tune-with-lora"],
    "use an NVIDIA GPU": ["how-to/use-a-gpu"],
    "what is the KV cache": ["explanation/memory", "explanation/how-it-works"],
}


# -- The reference, generated from the code


def reference(page: str) -> str:
    from pages import generate

    return generate(f"reference/{page}.md")


def test_every_public_name_has_a_docstring():
    import python_api

    assert python_api.undocumented() == []


def test_the_reference_has_every_public_name():
    import docstrings
    import python_api

    page, results = reference("python-api"), reference("result-types")
    for name in unspool.__all__:
        assert f"| [`{name}`](" in page, name
    kinds = python_api.public_classes()
    assert {kind.__name__ for kind in kinds} >= {"LanguageModel", "Generation", "Step", "Score"}
    for kind in kinds:
        assert f"## `{kind.__name__}` " in page
        listed = {item.name for item in docstrings.attributes(kind)}
        listed |= {item.name for item in docstrings.methods(kind)}
        inherited = {name for base in docstrings.own_bases(kind) for name in vars(base)}
        assert {name for name in inherited if not name.startswith("_")} <= listed
    for kinds_of_group in python_api.result_types().values():
        for kind in kinds_of_group:
            assert f"### `{kind.__name__}` " in results


def test_every_class_that_a_method_returns_is_documented():
    import docstrings
    import python_api

    known_names = {kind.__name__ for kind in python_api.public_classes()}
    known_names |= {k.__name__ for kinds in python_api.result_types().values() for k in kinds}
    known_names |= {"Floats", "None", "Iterator"}
    for name, method in vars(unspool.LanguageModel).items():
        if not name.startswith("_"):
            function = method.fget if isinstance(method, property) else method
            names = re.findall(r"\b[A-Z]\w+", str(function.__annotations__["return"]))
            assert set(names) <= known_names, name
    for kind in (unspool.Generation, unspool.Step, unspool.Score):
        assert docstrings.attributes(kind)


def test_the_reference_has_every_option():
    from options_page import GROUPS, option_types

    options = set(unspool.Options.__annotations__)
    assert {name for names in GROUPS.values() for name in names} == options == set(option_types())
    page = reference("options")
    assert all(f"`{name}` |" in page for name in options)


def test_the_reference_has_every_command_and_option():
    from command_line import commands

    page = reference("command-line")
    assert len(commands()) > 30
    for name, command in commands().items():
        text = page if name == "unspool" else page.split(f" `{name}` {{")[1].split("\n## ")[0]
        for option in command.params:
            if option.param_type_name == "option":
                assert all(f"`{word}`" in text for word in option.opts), (name, option.opts)


def test_the_reference_has_every_endpoint_and_field():
    from http_api import document, operations

    page = reference("http-api")
    assert len(operations()) > 60
    for method, path, operation in operations():
        assert f"### `{method} {path}`" in page
        for parameter in operation.get("parameters", ()):
            assert f"`{parameter['name']}`" in page
        for content in operation.get("requestBody", {}).get("content", {}).values():
            name = content["schema"]["$ref"].rpartition("/")[2]
            text = page.split(f"### `{name}` ")[1].split("\n### ")[0]
            for field in document()["components"]["schemas"][name]["properties"]:
                assert f"| `{field}` |" in text, (name, field)


def test_the_reference_has_every_environment_variable():
    from environment import INTERNAL, VARIABLES, variables_in_source

    documented = {name for variables in VARIABLES.values() for name in variables}
    names_read = variables_in_source()
    assert {"UNSPOOL_CACHE", "UNSPOOL_API_KEY", "UNSPOOL_ISA", "HF_HOME", "RANK"} <= names_read
    assert names_read - documented - set(INTERNAL) == set()
    stale = (
        documented
        - set(VARIABLES["Read by libraries"])
        - names_read
        - {"UNSPOOL_STRICT", "UNSPOOL_KERNELS"}
    )
    assert stale == set()


def test_the_reference_has_every_error():
    from error_pages import FIXES, exception_classes, messages

    assert set(exception_classes()) == set(FIXES)
    assert {name for name in unspool.__all__ if name.endswith("Error")} <= set(FIXES)
    assert all(fix for fix in FIXES.values())
    assert sum(map(len, messages().values())) > 500


def test_docstrings_become_markdown():
    from docstrings import markdown

    text = markdown(
        """Do a thing.

        width    how wide it is,
                 in pixels.
        a, b     two at a time.

            example(width=3)

        Args:
            name: The name
                of the thing.
        """
    )
    assert "- `width`: how wide it is, in pixels.\n- `a`, `b`: two at a time." in text
    assert "```python\nexample(width=3)\n```" in text
    assert "**Parameters**\n\n- `name`: The name of the thing." in text


# -- The built site


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The site, built with --strict by the first worker that needs it."""
    pytest.importorskip("material", reason="the extra `docs` is not installed")
    shared = tmp_path_factory.getbasetemp()
    shared = shared if worker_id == "master" else shared.parent
    folder = shared / "site"
    with FileLock(shared / "site.lock"):
        if not folder.exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
            environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
            build = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True
            )
            assert build.returncode == 0, build.stderr
            assert build.stderr == ""
    return folder


class _Loaded(HTMLParser):
    """Collects the addresses that a page loads by itself, and the text of its title."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        is_loaded = tag in ("script", "img", "iframe", "source", "video", "audio")
        if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.addresses.append(values.get("href") or "")
        elif is_loaded and values.get("src"):
            self.addresses.append(values["src"] or "")


def test_site_loads_nothing_from_other_hosts(site: Path):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        if page.name == "404.html":
            continue
        parser = _Loaded()
        parser.feed(page.read_text(encoding="utf-8"))
        for address in parser.addresses:
            assert not re.match(r"(https?:)?//", address), (page.name, address)
            assert (page.parent / address.partition("?")[0]).exists(), (page.name, address)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", sheet.read_text(encoding="utf-8"))


def test_site_lists_every_page(site: Path):
    home = (site / "index.html").read_text(encoding="utf-8")
    for folder in ("tutorials", "how-to", "reference", "explanation", "research"):
        index = (site / folder / "index.html").read_text(encoding="utf-8")
        assert f'href="{folder}/index.html"' in home
        for page in (site / folder).glob("*.html"):
            assert f'href="{page.name}"' in index or page.name == "index.html", page


def search(site: Path, queries: list[str]) -> list[list[str]]:
    """Return the pages that the site's search finds, best first: its own code, run by Node."""
    driver: Any = pytest.importorskip("playwright._impl._driver")
    node = driver.compute_driver_executable()
    command = [node[0] if isinstance(node, tuple) else str(node), str(DOCS / "site/search.js")]
    answer = subprocess.run(
        [*command, str(site)], input=json.dumps(queries), capture_output=True, text=True, check=True
    )
    results: list[list[str]] = json.loads(answer.stdout)
    return results


def test_search_answers_questions(site: Path):
    misses = {}
    answers = search(site, list(QUESTIONS))
    for (question, expected), pages in zip(QUESTIONS.items(), answers, strict=True):
        hits = [page.removesuffix(".html") for page in pages[:3]]
        if not set(hits) & set(expected):
            misses[question] = hits
    assert misses == {}


def test_search_finds_names_and_nothing_else(site: Path):
    (names, nothing) = search(site, ["environment variables", "zyzzyva"])
    assert "reference/environment-variables.html" in names[:3] and nothing == []
