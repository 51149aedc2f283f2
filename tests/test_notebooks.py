"""The notebooks run from top to bottom, and are stored without outputs.

Cells run in this process, as a kernel would: one namespace, the last expression is shown as HTML.
A small model replaces the default one, whose text does not matter here; `-m slow` runs them with
the default model, in a kernel.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells_of(path: Path, kind: str = "code") -> list[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell and return the value of its last expression, if it ends with one."""
    tree = ast.parse(source)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "cell", "exec"), names)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def run_notebook(path: Path) -> str:
    """Run all cells; return what they show as HTML."""
    names: dict[str, Any] = {"__name__": "__main__"}
    values = [run_cell(source, names) for source in cells_of(path)]
    return "".join(value._repr_html_() for value in values if hasattr(value, "_repr_html_"))


@pytest.fixture
def small_models(small_default: Path, small_lm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have `unspool.load()` return a small model; other models are loaded as they are."""
    from unspool.loading import load

    def load_small(model: Any = None, **options: Any) -> Any:
        if model is not None:
            return load(model, threads=1)
        if options.get("backend") == "torch":
            return load(small_default, backend="torch", memory=64 << 20)
        return small_lm

    monkeypatch.setattr("unspool.loading.load", load_small)


def test_there_are_six():
    assert len(NOTEBOOKS) == 6


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_outputs(path: Path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
    assert cells_of(path, "markdown")[0].startswith("# ")


@pytest.mark.real
@pytest.mark.usefixtures("small_models")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path: Path, capsys: pytest.CaptureFixture[str]):
    html = run_notebook(path)
    output = capsys.readouterr().out
    assert html or output
    if path.stem.startswith("6"):
        assert "bits per byte" in output and "step  60" in output
    elif path.stem.startswith("5"):
        assert "tokens per pass" in output


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_in_a_kernel_with_the_default_model(path: Path, tmp_path: Path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert outputs and not any(output.output_type == "error" for output in outputs)
