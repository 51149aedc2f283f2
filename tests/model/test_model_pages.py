"""The pages about models, licences and the architecture say what the code says."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from unspool.model.shipped import shipped_models

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
HOW_TO = (
    "choose-a-model", "download-and-manage-models", "run-quantized-models",
    "use-models-of-other-programs",
)  # fmt: skip


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def test_verified_models_is_what_its_script_writes():
    spec = importlib.util.spec_from_file_location("script", DOCS / "make_verified_models.py")
    assert spec is not None and spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "script", script)  # for its dataclass
        spec.loader.exec_module(script)
        assert script.page() == read("reference/verified-models.md"), (
            "run python docs/make_verified_models.py"
        )


@pytest.mark.parametrize("page", HOW_TO)
def test_commands_exist(page: str):
    import typer.main

    from unspool.cli.main import app_with, with_command

    root: Any = typer.main.get_command(app_with())
    text = read(f"how-to/{page}.md")
    lines = [
        line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ] + re.findall(r"`(unspool [^`]+)`", text)  # fmt: skip
    assert lines
    for line in lines:
        if "--install-completion" in line:  # an option of the program, not of a command
            continue
        words = with_command(shlex.split(line)[1:], piped=False)
        command = root.commands[words[0]]
        if len(words) > 1 and words[1] in getattr(command, "commands", {}):
            command = command.commands[words[1]]
        known_names = {name for option in command.params for name in (*option.opts, "--help")}
        assert all(word in known_names for word in words if word.startswith("--")), line


def test_python_of_the_page_about_quantized_models(capsys: pytest.CaptureFixture[str]):
    (block,) = re.findall(r"```python\n(.*?)```", read("how-to/run-quantized-models.md"), re.DOTALL)
    exec(compile(block, "run-quantized-models.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_licences_name_everything_that_is_shipped():
    text = read("reference/licences.md")
    for name in shipped_models():
        assert f"`{name}`" in text
    data = [file for file in (ROOT / "tests" / "data").iterdir() if file.suffix in (".gguf", ".md")]
    for file in data:
        assert f"`{file.name}`" in text
    for kind in ("txt", "toml", "gguf", "bin", "npz"):
        for path in (ROOT / "src" / "unspool").rglob(f"*.{kind}"):
            if path.name != "CMakeLists.txt":
                assert path.name in text, path
    vendor = (ROOT / "src/unspool/page/code/vendor/README.md").read_text(encoding="utf-8")
    for version in re.findall(r"\| (\d+\.\d+\.\d+) \|", vendor):
        assert version in text


def test_architecture_names_what_exists():
    page = DOCS / "explanation" / "architecture.md"
    text = page.read_text(encoding="utf-8")
    references = re.findall(r"\[`([\w.]+)`\]\(([^)]+\.(?:py|cpp|h))\)", text)
    assert len(references) > 60
    for name, target in references:
        if not name.endswith((".py", ".cpp", ".h")):
            source = (page.parent / target).read_text(encoding="utf-8")
            assert re.search(rf"\b{name.rpartition('.')[2]}\b", source), (name, target)
