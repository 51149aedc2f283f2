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
def test_how_it_works_with_its_numbers(default_model: Path, load: Any):
    """The native backend gives these numbers on every processor, also with UNSPOOL_ISA=plain."""
    import unspool

    page = str(ROOT / "docs" / "explanation" / "how-it-works.md")
    with unspool.load(default_model, device="cpu", backend="native", memory=64 << 20) as native_lm:
        load(native_lm)
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


# How-to pages about Python. Blocks of a page share their names.
PYTHON_PAGES = (
    "batch-many-prompts",
    "get-logprobs",
    "guards",
    "hidden-states",
    "hold-a-conversation",
    "rewind-and-fork",
    "sampling-settings",
    "samples-and-beam",
    "save-and-replay",
    "steer",
    "stream-and-async",
    "structured-output",
    "texts-longer-than-the-context",
    "tokenize-text",
)


@pytest.mark.real
@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_how_to_pages(
    page: str, small_default: Path, small_lm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On a tiny model: what it writes does not matter."""
    import unspool

    load_model = unspool.load
    options_of_blocks = []

    def load_small(*_: Any, **options: Any) -> Any:
        options_of_blocks.append(options)
        return load_model(small_default, memory=64 << 20, **options) if options else small_lm

    monkeypatch.setattr("unspool.loading.load", load_small)
    monkeypatch.setattr(type(small_lm), "close", lambda self: None)  # other tests use it later
    monkeypatch.chdir(tmp_path)
    if page == "steer":
        from helpers.sae_folder import write_saelens

        write_saelens(tmp_path / "sae", "standard", width=small_lm.config.width)
    run(blocks_of((ROOT / f"docs/how-to/{page}.md").read_text(encoding="utf-8")), {})
    assert options_of_blocks


def test_reasoning_and_tools(tmp_path: Path, load: Any, capsys: pytest.CaptureFixture[str]):
    import unspool
    from helpers.thought_families import QWEN_OPEN, save_thinker

    blocks = blocks_of((ROOT / "docs/how-to/reasoning-and-tools.md").read_text(encoding="utf-8"))
    assert len(blocks) == 3
    folder = save_thinker(tmp_path, QWEN_OPEN)
    with unspool.load(folder, memory=8 << 20, context=2048) as thinker:
        load(thinker)
        run(blocks, {})
    assert "get_weather" in capsys.readouterr().out


@pytest.mark.real
@pytest.mark.parametrize("page", ["first-text", "look-inside", "steer"])
def test_tutorials_with_their_output(
    page: str, real_lm: Any, load: Any, capsys: pytest.CaptureFixture[str]
):
    """Commands and Python of a lesson print what the lesson shows, with the default model."""
    from unspool.cli.main import _exit_code

    load(real_lm)
    text = (ROOT / f"docs/tutorials/{page}.md").read_text(encoding="utf-8")
    examples = re.findall(r"```(sh|python)\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL)
    num_blocks = len(blocks_of(text)) + len(blocks_of(text, "sh"))
    assert len(examples) == num_blocks >= 6, "a block without its output"
    names: dict[str, Any] = {}
    for kind, block, expected in examples:
        if kind == "sh":
            assert _exit_code(shlex.split(block)[1:]) == 0
        else:
            run([block], names)
        assert capsys.readouterr().out == expected, block


DIFFUSION = "how-to/generate-with-diffusion.md"
SUDOKU = "Try it without a download: Sudoku"
SEARCH = "how-to/search-with-a-budget.md"


@pytest.mark.real
def test_diffusion_guide(small_default: Path, load: Any):
    """A causal model with bidirectional attention: its text means nothing, but the code runs."""
    import unspool

    page = (ROOT / "docs" / DIFFUSION).read_text(encoding="utf-8")
    blocks = [block for block in blocks_of(page) if "LLaDA" in block]
    assert len(blocks) == 4 == len(blocks_of(page)) - 1
    with unspool.load(small_default, memory=64 << 20) as seeing:
        for name, value in {"sight": "whole", "mask_id": seeing.vocab_size - 1}.items():
            object.__setattr__(seeing.config, name, value)
        load(seeing)
        run(blocks)


def test_the_puzzle_pairs(capsys: pytest.CaptureFixture[str]):
    (block,) = blocks_of(section(DIFFUSION, SUDOKU))
    run([block])
    filled, written, _ = capsys.readouterr().out.splitlines()
    assert len(filled.split()[0]) == 81 and written.split()[-1] in ("True", "False")


@pytest.mark.real
@pytest.mark.parametrize("page", ["infill.md", "edit-a-text.md"])
@pytest.mark.usefixtures("lm")
def test_fill_and_edit_guide(page: str, capsys: pytest.CaptureFixture[str]):
    (block,) = blocks_of((ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8"))
    run([block])
    assert "mat" in capsys.readouterr().out


@pytest.mark.real
@pytest.mark.usefixtures("lm")
def test_search_guide(small_server: Any, capsys: pytest.CaptureFixture[str]):
    """Each example may use the names of those before it, as a reader of the page does."""
    blocks = blocks_of((ROOT / "docs" / SEARCH).read_text(encoding="utf-8"))
    assert len(blocks) == 8
    run([block.replace("http://127.0.0.1:8000", small_server.url) for block in blocks], {})
    output = capsys.readouterr().out
    assert "NodeAdded(node=1" in output
    assert "judged=" in output and "won" in output and "None" in output


@pytest.mark.real
@pytest.mark.usefixtures("lm")
def test_speculative_decoding_guide():
    (block,) = blocks_of((ROOT / "docs/how-to/speculative-decoding.md").read_text())
    run([block])


@pytest.mark.real
def test_adapter_guide(
    lm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from helpers.adapter_support import random_adapter
    from unspool.errors import UnspoolError
    from unspool.model.adapters import write_adapter

    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("poet", "clerk")):
        write_adapter(random_adapter(lm.config, 2, seed=seed), Path("adapters") / name, lm.config)
    (block,) = blocks_of((ROOT / "docs/how-to/use-lora-adapters.md").read_text())
    run([block])
    assert len(capsys.readouterr().out.splitlines()) >= 2
    with pytest.raises(UnspoolError, match="poet"):  # the guide unloads it
        lm.generate("The sea", adapter="poet", max_tokens=1)
    lm.unload_adapter("clerk")


def test_the_reward_function_of_the_guide():
    (block,) = blocks_of((ROOT / "docs/how-to/preference-and-rl.md").read_text())
    names: dict[str, Any] = {}
    run([block], names)
    assert names["judge"]("2+2?", " 4\n", {"expected": "4"}) == 1
    assert names["judge"]("2+2?", "five", {"expected": "4"}) == 0


def test_training_commands_of_the_guides_exist():
    """Every `unspool train` command and option that the new pages show is known."""
    import typer.main

    from unspool.cli.main import app_with, with_command

    root: Any = typer.main.get_command(app_with())
    pages = [*sorted((ROOT / "docs/how-to").glob("*.md")), ROOT / "docs/tutorials/train.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages).replace("\\\n", " ")
    lines = re.findall(
        r"^(?:\$ )?(unspool (?:train|think|costs|fill|edit)\b.*)$", text, re.MULTILINE
    )
    assert len(lines) > 40
    for line in lines:
        words = with_command(shlex.split(line, comments=True)[1:], piped=False)
        command = root.commands[words[0]]
        if words[0] == "train":
            command = command.commands[words[1]]
        known_names = {name for option in command.params for name in option.opts}
        assert all(word in known_names for word in words if word.startswith("--")), line


def test_the_tables_of_policies_and_verifiers_are_whole():
    from unspool.decoding.search.think import POLICIES, VERIFIER_NAMES, policy_options

    verifiers = section("reference/search-policies.md", "Verifiers")
    for name in VERIFIER_NAMES:
        assert f"`{name}`" in verifiers, name

    policies = section("reference/search-policies.md", "Policies")
    rows = re.findall(r"^\| `([a-z-]+)` \|(.*)$", policies, re.MULTILINE)
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
    (block,) = blocks_of(section(SEARCH, "On the command line"), "sh")
    for line in block.splitlines():
        assert _exit_code(shlex.split(line)[1:]) == 0, line
    assert (tmp_path / "search.json").stat().st_size > 100


def test_the_tables_of_diffusion_settings_and_costs_are_whole():
    from dataclasses import fields

    from unspool.costs.measuring import PARTS
    from unspool.decoding.diffusion.options import DiffusionOptions
    from unspool.engine.request import SamplingOptions
    from unspool.train.pretrain import NewSettings

    options = section("reference/diffusion-options.md", "Options")
    for name in DiffusionOptions.__annotations__.keys() - SamplingOptions.__annotations__.keys():
        assert f"`{name}`" in options, name
    settings = section("reference/training-files.md", "Settings of a new model")
    for field in fields(NewSettings):
        assert f"`{field.name}`" in settings, field.name
    report = (ROOT / "docs/reference/cost-report.md").read_text(encoding="utf-8")
    guide = (ROOT / "docs/how-to/measure-costs.md").read_text(encoding="utf-8")
    for part in PARTS:
        assert f"`{part}`" in guide and re.search(rf"^## {part}\b", report, re.MULTILINE), part


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
    """The commands and options in the pages about replicas are those that the program knows."""
    import typer.main

    from unspool.cli.main import app_with
    from unspool.scale.replicas.config import GatewayConfig, ReplicasConfig

    serve: Any = typer.main.get_command(app_with()).commands["serve"]  # type: ignore[attr-defined]
    known_names = {name for option in serve.params for name in option.opts}
    text = (ROOT / "docs" / "how-to" / "replicas.md").read_text(encoding="utf-8")
    (_, block) = blocks_of(text, "sh")
    displayed = re.findall(r"(?<=\s)--[a-z-]+", block) + re.findall(r"`(--[a-z-]+)`", text)
    assert len(displayed) > 8 and set(displayed) <= known_names
    report = set(
        re.findall(r"`([a-z_]+)`", section("reference/server-options.md", "Replicas in serve.yaml"))
    )
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


def test_tables_are_those_of_the_data(monkeypatch: pytest.MonkeyPatch):
    """Figures in README.md and docs/research come from docs/research/data."""
    import runpy

    monkeypatch.setattr("sys.argv", ["make_tables.py", "--check"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "docs" / "make_tables.py"), run_name="__main__")
    assert end.value.code == 0
