"""`generation.save`, `branch.save` and `lm.open`: a text in one file, to continue it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unspool.errors import UnspoolError

PROMPT = "The old lighthouse keeper climbed the stairs every evening, and"


@pytest.mark.parametrize("options", [{}, {"regex": "[a-z 🙂]*"}, {"guard": "loop"}], ids=str)
def test_a_saved_text_goes_on(lm: Any, tmp_path: Path, options: Any):
    complete = lm.generate(PROMPT, max_tokens=24, seed=3, end=False, top=3, **options)
    text = lm.generate(PROMPT, max_tokens=9, seed=3, end=False, top=3, explain=True, **options)
    text.save(tmp_path / "text.json")
    opened = lm.open(tmp_path / "text.json")
    assert opened.steps == text.steps and opened.text == text.text and not opened.notes
    assert opened.resume(max_tokens=15).tokens == complete.tokens
    assert lm.replay(tmp_path / "text.json").exact


def test_a_saved_branch_goes_on_with_the_same_bits(lm: Any, tiny_lm: Any, tmp_path: Path):
    ids = lm.tokenizer.encode(PROMPT * 5)
    with lm.open_branch(ids) as branch:
        branch.append()
        branch.save(tmp_path / "branch.kv")
        expected = np.asarray(branch.append(ids[:3])).copy()
    lm.engine.call(lambda: lm.engine.tree.index.clear())
    branch = lm.open(tmp_path / "branch.kv")
    assert branch.tokens == ids and branch.num_computed == len(ids) - 1
    assert np.array_equal(np.asarray(branch.append(ids[:3])), expected)
    branch.release()
    data = bytearray((tmp_path / "branch.kv").read_bytes())
    data[-5] ^= 1  # its pages are not trusted, its tokens are
    (tmp_path / "branch.kv").write_bytes(data)
    lm.engine.call(lambda: lm.engine.tree.index.clear())
    branch = lm.open(tmp_path / "branch.kv")
    assert branch.tokens == ids and branch.num_computed == 0
    assert np.array_equal(np.asarray(branch.append(ids[:3])), expected)
    branch.release()
    (tmp_path / "branch.kv").write_bytes(bytes(data[:30]))
    with pytest.raises(UnspoolError, match="damaged"):
        lm.open(tmp_path / "branch.kv")
    with pytest.raises(UnspoolError, match="cannot be read"):
        lm.open(tmp_path / "none")
    (tmp_path / "other").write_text("{}")
    with pytest.raises(UnspoolError, match="not an Unspool trace"):
        lm.open(tmp_path / "other")
