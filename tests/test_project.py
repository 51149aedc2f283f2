"""The project holds its own rules: types, style, a quick import. For imports see test_imports."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "unspool"


def test_importing_unspool_is_light():
    code = (
        "import unspool, sys; print(*[m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []


def test_help_does_not_load_torch():
    code = (
        "import sys; from unspool.cli.main import _exit_code; _exit_code(['--help']); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_core_imports_with_few_packages():
    """Where only numpy, tokenizers and jinja2 are there, models still run."""
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('torch', 'safetensors', 'typer', 'rich', 'gguf', 'click',
                                  'huggingface_hub', 'filelock'):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import unspool
unspool.load
import unspool.conversation
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_messages_are_formatted():
    """No raised text holds a {name}: the f before its quotes was forgotten."""
    field = r"\{[a-z_]\w*([.!:\[][^{}]*)?\}"
    unformatted = []
    for file in SOURCE.rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        if not re.search(rf"""(?<!f)["'][^"'\n]*{field}""", source):
            continue
        tree = ast.parse(source)
        formatted = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr)
            for part in ast.walk(node)
        }
        unformatted += [
            f"{file.relative_to(SOURCE)}:{part.lineno}: {part.value}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Raise)
            for part in ast.walk(node)
            if isinstance(part, ast.Constant)
            and isinstance(part.value, str)
            and id(part) not in formatted
            and re.search(field, part.value)
        ]
    assert not unformatted


def test_lint_and_format():
    for arguments in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, "src", "tests", "bench"],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


def test_native_sources_are_formatted():
    program = Path(sys.executable).parent / "clang-format"
    folders = (SOURCE / "backends" / "cpu" / "native", ROOT / "tests" / "backends")
    every = [file for folder in folders for file in folder.rglob("*")]
    files = [file for file in every if file.suffix in (".h", ".cpp")]
    assert len(files) > 30
    done = subprocess.run(
        [str(program), "--dry-run", "--Werror", *map(str, files)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[:2000]


def test_the_native_library_is_built_where_there_is_a_compiler():
    from unspool import native

    if shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"):
        assert native.missing_reason() is None


def test_ci_runs_the_command_in_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    command = re.search(r"^(python3 -m venv .*pytest.*)$", readme, re.MULTILINE)
    assert command, "the README shows one command that sets up and passes the tests"
    assert "README.md" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_every_test_dependency_is_pinned():
    """The README's command installs exact versions, and each satisfies what pyproject asks for."""
    lines = (ROOT / "tests" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "-c tests/constraints.txt" in readme
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in extras.values() for line in extra)]
    requirements = [Requirement(line) for line in lines]
    for requirement in requirements:
        if requirement.name != "unspool":
            version = pins.get(canonicalize_name(requirement.name))
            assert version, f"{requirement.name} is not in tests/constraints.txt"
            assert version in requirement.specifier, f"{requirement} does not admit {version}"
