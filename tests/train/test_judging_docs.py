"""What docs/train.md shows about judging, export and scaling is run as it stands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from helpers import small_model as small
from unspool.train.export import export_folder
from unspool.train.running.runs import Run

PAGE = Path(__file__).parents[2] / "docs" / "train.md"


@pytest.mark.parametrize("section", ["Judging", "Export", "Scaling"])
def test_the_examples_run(
    section: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNSPOOL_RUNS", raising=False)
    small.save_model(tmp_path / "model")
    run = Run.create("runs/speeches", "new")
    checkpoint = run.folder / "checkpoints" / "000010"
    export_folder("model", checkpoint)
    (checkpoint / "training.json").write_text(json.dumps({"step": 10, "tokens": 100}))
    text = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.S | re.M)
    assert text, f"the section {section} is there"
    blocks = re.findall(r"```python\n(.*?)```", text[1], re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "train.md", "exec"), {})
    if section == "Scaling":
        # 1e21 FLOP: some billions of parameters, as in the paper.
        assert re.search(r"\de\+09 parameters", capsys.readouterr().out)
