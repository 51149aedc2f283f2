"""The documentation is true: its examples are run, its links lead somewhere."""

from __future__ import annotations

import doctest
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have `unspool.load()` in the examples give a model that is loaded already."""
    return lambda lm: monkeypatch.setattr("unspool.loading.load", lambda *args, **options: lm)


@pytest.fixture
def lm(small_lm: Any, load: Any) -> Any:
    """A tiny model with the default one's vocabulary: what it writes does not matter."""
    load(small_lm)
    return small_lm


@pytest.mark.real
def test_how_it_works_with_its_numbers(torch_lm: Any, load: Any):
    load(torch_lm)
    page = str(ROOT / "docs" / "how-it-works.md")
    failed, tried = doctest.testfile(page, module_relative=False, verbose=False)
    assert tried > 20 and failed == 0


def section(page: str, heading: str) -> str:
    """The text below a heading, up to the next of the same level."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def blocks_of(text: str, kind: str = "python") -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


def run(blocks: list[str], names: dict[str, Any] | None = None) -> None:
    """Run blocks of code, each with separate names unless `names` is shared."""
    for block in blocks:
        exec(compile(block, "docs", "exec"), {} if names is None else names)


@pytest.mark.real
def test_python_guide(lm: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(type(lm), "close", lambda self: None)  # other tests use it later
    blocks = blocks_of((ROOT / "docs/python.md").read_text())
    assert len(blocks) >= 5
    run(blocks)


def test_chat_guide(tmp_path: Path, load: Any):
    import unspool
    from helpers.thought_families import QWEN_OPEN, save_thinker

    with unspool.load(save_thinker(tmp_path, QWEN_OPEN), memory=8 << 20) as thinker:
        load(thinker)
        (block,) = blocks_of((ROOT / "docs/chat.md").read_text())
        run([block])


@pytest.mark.real
def test_beyond_left_to_right(small_default: Path, load: Any):
    """A causal model with bidirectional attention: its text means nothing, but the code runs."""
    import unspool

    page = (ROOT / "docs/beyond.md").read_text(encoding="utf-8")
    blocks = blocks_of(page.split("## Diffusion")[1].split("\n## ")[0])
    assert len(blocks) >= 4
    with unspool.load(small_default, memory=64 << 20) as seeing:
        for name, value in {"sight": "whole", "mask_id": seeing.vocab_size - 1}.items():
            object.__setattr__(seeing.config, name, value)
        load(seeing)
        run(blocks)


def test_the_puzzle_pairs(capsys: pytest.CaptureFixture[str]):
    (block,) = blocks_of(section("beyond.md", "The Sudoku pair"))
    run([block])
    filled, written, _ = capsys.readouterr().out.splitlines()
    assert len(filled.split()[0]) == 81 and written.split()[-1] in ("True", "False")


@pytest.mark.real
@pytest.mark.parametrize("heading", ["Fill a gap", "Edit"])
@pytest.mark.usefixtures("lm")
def test_fill_and_edit_guide(heading: str, capsys: pytest.CaptureFixture[str]):
    (block,) = blocks_of(section("beyond.md", heading))
    run([block])
    assert "mat" in capsys.readouterr().out


@pytest.mark.real
@pytest.mark.usefixtures("lm")
def test_judges_and_servers_that_think(small_server: Any, capsys: pytest.CaptureFixture[str]):
    for heading, least in (("Judges", 3), ("Over HTTP", 2)):
        blocks = blocks_of(section("thinking.md", heading))
        assert len(blocks) >= least
        run([block.replace("http://127.0.0.1:8000", small_server.url) for block in blocks], {})
    output = capsys.readouterr().out
    assert "judged=" in output and "won" in output and "None" in output


@pytest.mark.real
@pytest.mark.usefixtures("lm")
def test_thinking_in_python(capsys: pytest.CaptureFixture[str]):
    page = (ROOT / "docs" / "thinking.md").read_text(encoding="utf-8")
    blocks = blocks_of(page.split("\n## Judges\n")[0])
    assert len(blocks) == 3
    run(blocks, {})
    assert "NodeAdded(node=1" in capsys.readouterr().out


def test_the_tables_of_policies_and_judges_are_whole():
    from unspool.decoding.search.think import POLICIES, VERIFIER_NAMES, policy_options

    judges = section("thinking.md", "Judges")
    for name in VERIFIER_NAMES:
        assert f"`{name}`" in judges, name

    rows = re.findall(r"^\| `([a-z-]+)` \|(.*)$", section("thinking.md", "Policies"), re.MULTILINE)
    assert [name for name, _ in rows] == list(POLICIES)
    for name, report in rows:
        for option, usual in policy_options(name).items():
            displayed = re.search(rf"`{option}(?:=([^`]+))?`", report)
            assert displayed, f"{name}: {option}"
            if isinstance(usual, int) and displayed[1]:
                assert displayed[1] == str(usual), f"{name}: {option}"


@pytest.mark.real
@pytest.mark.usefixtures("lm")
def test_thinking_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from unspool.cli.main import _exit_code

    monkeypatch.chdir(tmp_path)
    (block,) = blocks_of(section("thinking.md", "On the command line"), "sh")
    for line in block.splitlines():
        assert _exit_code(shlex.split(line)[1:]) == 0, line
    assert (tmp_path / "search.json").stat().st_size > 100


def test_python_guide_names_every_method():
    import unspool

    table = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    methods = [name for name in vars(unspool.LanguageModel) if not name.startswith("_")]
    assert len(methods) > 12
    for name in [*methods, "score", "attach", "close"]:
        assert re.search(rf"[`.]{name}\b", table), name


@pytest.mark.real
def test_readme_python(lm: Any, capsys: pytest.CaptureFixture[str]):
    blocks = blocks_of((ROOT / "README.md").read_text())
    assert blocks
    # Those that ask a server are run in the tests of the server's guide.
    run([block for block in blocks if "http://" not in block])
    expected = lm.generate("The capital of Germany is", max_tokens=8, temperature=0).text
    assert expected in capsys.readouterr().out


def test_readme_commands_exist():
    """Every command and option that the README shows is one that the program knows."""
    import typer.main

    from unspool.cli.main import app_with, with_command

    root: Any = typer.main.get_command(app_with())
    displayed = re.findall(r"`(unspool [^`]+)`", (ROOT / "README.md").read_text())
    assert len(displayed) > 6
    for line in displayed:
        words = with_command(shlex.split(line.replace("COMMAND", "run"))[1:], piped=False)
        command = root.commands[words[0]]
        known_names = {name for option in command.params for name in (*option.opts, "--help")}
        assert all(word in known_names for word in words if word.startswith("--")), line


def test_replicas_are_started_as_shown():
    """The commands and options of docs/scale.md are those that the program knows."""
    import typer.main

    from unspool.cli.main import app_with
    from unspool.scale.replicas.config import GatewayConfig, ReplicasConfig

    serve: Any = typer.main.get_command(app_with()).commands["serve"]  # type: ignore[attr-defined]
    known_names = {name for option in serve.params for name in option.opts}
    text = section("scale.md", "Replicas")
    (block,) = blocks_of(text, "sh")
    displayed = re.findall(r"(?<=\s)--[a-z-]+", block) + re.findall(r"`(--[a-z-]+)`", text)
    assert len(displayed) > 8 and set(displayed) <= known_names
    report = set(re.findall(r"`([a-z_]+)`", text))
    fields = {*ReplicasConfig.__dataclass_fields__, *GatewayConfig.__dataclass_fields__}
    assert fields - {"log"} <= report


def anchors(text: str) -> set[str]:
    """The anchors of a page: of its headings, as GitHub and MkDocs form them, and its own ids."""
    text = re.sub(r"^(```+|~~~+).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    names = set(re.findall(r"<\w+ [^>]*?(?:id|name)=[\"']([^\"']+)", text))
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        names |= set(re.findall(r"\{[^}]*#([\w.-]+)[^}]*\}\s*$", heading))
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain)
        names |= {slug.replace(" ", "-"), re.sub(r"[-\s]+", "-", slug)}
    return names


def generated_pages() -> set[Path]:
    """Pages that exist only in the built site."""
    sys.path.insert(0, str(ROOT / "docs" / "site"))
    from pages import FOLDERS, GENERATED

    names = [*GENERATED, *(f"{folder}/index.md" for folder in FOLDERS)]
    return {ROOT / "docs" / name for name in names}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^(```+|~~~+).*?^\1|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^()\s]+)\)", prose)
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if file in generated_pages() and not file.exists():
            continue  # its anchors are checked when the site is built
        assert file.exists(), target
        if anchor and file.suffix == ".md" and file not in generated_pages():
            assert anchor in anchors(file.read_text(encoding="utf-8")), target


@pytest.mark.real
def test_home_page(lm: Any, capsys: pytest.CaptureFixture[str]):
    run(blocks_of((ROOT / "docs/index.md").read_text(encoding="utf-8")))
    assert len(capsys.readouterr().out.splitlines()) >= 5
