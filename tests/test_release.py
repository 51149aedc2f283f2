"""A release: versions agree, workflows call what exists, images are well formed."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import unspool

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
CONTAINERFILES = sorted((ROOT / "deploy").glob("Containerfile.*"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def steps_of(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", ())]


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


# -- versions and metadata -------------------------------------------------------------------------


def test_one_version():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "check_release.py", f"v{unspool.__version__}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    citation = read_yaml(ROOT / "CITATION.cff")
    assert citation["version"] == unspool.__version__
    for file in CONTAINERFILES:
        versions = re.findall(r"unspool:(\d[\w.]*)-|image\.version=\"(.+?)\"", file.read_text())
        assert {"".join(pair) for pair in versions} == {unspool.__version__}, file.name


def test_a_tag_of_another_version_is_refused():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "check_release.py", "v0.0.1"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "got v0.0.1" in done.stderr


def test_badges_name_workflows_of_the_repository():
    names = re.findall(r"actions/workflows/([\w.-]+)", (ROOT / "README.md").read_text("utf-8"))
    assert names and all((ROOT / ".github" / "workflows" / name).is_file() for name in names)


def test_links_on_the_package_index_are_absolute():
    """The description of the package is the README with absolute links and pictures."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    for rule in hook["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    text = text.replace("$HFPR_VERSION", unspool.__version__)
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)", prose) + re.findall(r'(?:src|href)="([^"]+)"', prose)
    assert targets and all(target.startswith(("https://", "#")) for target in targets)
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", prose)
    for picture in pictures:
        prefix = f"https://raw.githubusercontent.com/unspool-ai/unspool/v{unspool.__version__}/"
        if picture.startswith(prefix):
            assert (ROOT / picture.removeprefix(prefix)).is_file(), picture


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("[a](docs/x.md#y)", "[a](https://github.com/unspool-ai/unspool/blob/v1/docs/x.md#y)"),
        ("[a](#y)", "[a](#y)"),
        ("[a](https://b.c)", "[a](https://b.c)"),
        ("![a](docs/a.png)", "![a](https://raw.githubusercontent.com/unspool-ai/unspool/v1/docs/a.png)"),
        ("[![a](https://b/c.svg)](LICENSE)",
         "[![a](https://b/c.svg)](https://github.com/unspool-ai/unspool/blob/v1/LICENSE)"),
        ('<img width="9" src="docs/a.png">',
         '<img width="9" src="https://raw.githubusercontent.com/unspool-ai/unspool/v1/docs/a.png">'),
    ],
)  # fmt: skip
def test_links_are_made_absolute(source: str, expected: str):
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    for rule in hook["substitutions"]:
        source = re.sub(rule["pattern"], rule["replacement"], source)
    assert source.replace("$HFPR_VERSION", "1") == expected


def test_the_wheel_script_translates_every_flag_for_arm():
    """Zig has its own names for the instruction sets that CMakeLists.txt selects."""
    spec = importlib.util.spec_from_file_location("wheels", ROOT / "tools" / "build_wheels.py")
    assert spec and spec.loader
    wheels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wheels)
    native = ROOT / "src" / "unspool" / "backends" / "cpu" / "native"
    source = (native / "CMakeLists.txt").read_text(encoding="utf-8")
    flags = {*re.findall(r"-march=[\w.+-]+|-mtune=[\w-]+", source)}
    flags -= {"-march=native"}  # asked only what it means, and never for a wheel
    assert len(flags) >= 3 and flags <= {*wheels.ZIG_FLAGS}


# -- workflows -------------------------------------------------------------------------------------

# Modules that workflows install by name.
INSTALLED = {"build", "twine", "mkdocs", "playwright", "pip"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_what_exists(path: Path):
    workflow = read_yaml(path)
    assert workflow["name"] and workflow["permissions"] == {"contents": "read"}
    assert True in workflow, "`on` is a boolean in YAML 1.1"
    for step in steps_of(workflow):
        if "uses" in step:
            # A tag can be moved, a commit cannot. PyPI asks for the branch of its action.
            pinned = r"[\w./-]+@[0-9a-f]{40}|pypa/gh-action-pypi-publish@release/v1"
            assert re.fullmatch(pinned, step["uses"]), step["uses"]
        for line in step.get("run", "").splitlines():
            check_command(line)
    for job in workflow["jobs"].values():
        if local := job.get("uses"):
            assert (ROOT / local).is_file(), local
            assert "workflow_call" in read_yaml(ROOT / local)[True]
        for needed in [job.get("needs", [])] if isinstance(job.get("needs"), str) else ():
            assert needed in workflow["jobs"], needed


def check_command(line: str) -> None:
    """Fail if the files, modules, extras or tests that a command names do not exist."""
    words = shlex.split(line)
    for word in words:
        if re.match(r"(tools|tests|deploy|docs)/", word):
            assert (ROOT / word).exists(), line
        for extra in re.findall(r"^\.\[(.+)\]$", word):
            known_extras = PROJECT["project"]["optional-dependencies"]
            assert {*extra.split(",")} <= {*known_extras}, line
    if words[0].startswith("python") and words[1] == "-m":
        module = words[2]
        assert module in INSTALLED or importlib.util.find_spec(module), line
    if words[:3] == ["python", "-m", "unspool"]:
        from unspool.cli.main import _COMMANDS

        assert words[3] in _COMMANDS, line


def test_every_workflow_of_a_release_is_there():
    assert {path.stem for path in WORKFLOWS} == {"lint", "test", "wheels", "docs", "release"}
    runners = read_yaml(WORKFLOWS[[path.stem for path in WORKFLOWS].index("test")])
    matrix = runners["jobs"]["test"]["strategy"]["matrix"]["runner"]
    assert matrix == ["ubuntu-24.04", "ubuntu-24.04-arm"]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_issue_templates(path: Path):
    template = read_yaml(path)
    if path.stem == "config":
        assert all(link["url"].startswith("https://") for link in template["contact_links"])
        return
    assert template["name"] and template["description"]
    ids = [part["id"] for part in template["body"]]
    assert len({*ids}) == len(ids)
    for part in template["body"]:
        assert part["type"] in ("textarea", "input") and part["attributes"]["label"]


# -- containers ------------------------------------------------------------------------------------


def instructions(file: Path) -> list[tuple[str, str]]:
    """The instructions of a Containerfile, with continued lines joined."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("file", CONTAINERFILES, ids=lambda file: file.suffix)
def test_images(file: Path):
    steps = instructions(file)
    known_names = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "LABEL", "ENV", "USER", "VOLUME",
                   "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}  # fmt: skip
    assert {name for name, _ in steps} <= known_names
    base = next(text for name, text in steps if name == "ARG" and text.startswith("BASE="))
    assert re.search(r":\d+\.\d+\.\d+-", base), "the base image is pinned"
    stages = [number for number, (name, _) in enumerate(steps) if name == "FROM"]
    assert len(stages) == 2, "the image has no compiler of the build"
    last = dict(steps[stages[-1] :])
    assert last["USER"] not in ("root", "0") and last["VOLUME"] == "/cache"
    assert "/health" in last["HEALTHCHECK"] and "unspool" in last["ENTRYPOINT"]
    for name, text in steps:
        if name == "COPY" and not text.startswith("--from"):
            for source in text.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in (ROOT / ".containerignore").read_text().split()
    check_serve_options(last["CMD"])


def check_serve_options(command: str) -> None:
    import typer.main

    from unspool.cli.main import app_with

    words = yaml.safe_load(command)
    assert words[0] == "serve"
    serve: Any = typer.main.get_command(app_with(["serve"])).commands["serve"]  # type: ignore[attr-defined]
    known_names = {name for option in serve.params for name in option.opts}
    assert {word for word in words if word.startswith("--")} <= known_names


# -- the guide -------------------------------------------------------------------------------------


def test_the_install_guide_names_every_extra_and_command():
    import typer.main

    from unspool.cli.main import app_with, with_command

    page = (ROOT / "docs" / "how-to" / "install.md").read_text(encoding="utf-8")
    for extra in ("torch", "train", "ray"):
        assert (
            f"`unspool[{extra}]`" in page and extra in PROJECT["project"]["optional-dependencies"]
        )
    root: Any = typer.main.get_command(app_with())
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    commands = [line.split("#")[0] for line in lines if re.match(r"(\.venv/bin/)?unspool ", line)]
    assert len(commands) >= 5
    for line in commands:
        words = with_command(shlex.split(line)[1:], piped=False)
        assert words[0] in (*root.commands, "--install-completion"), line
    for image in ("cpu", "cuda"):
        assert f"ghcr.io/unspool-ai/unspool:{unspool.__version__}-{image}" in page
