"""What a type checker says of Unspool and of programs that use it: every option has its type."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

GOOD = """
import numpy as np
import unspool
import numpy.typing as npt
from unspool import Generation, Options

Ids = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float64]

with unspool.load() as lm:
    one: Generation = lm.generate("x", temperature=0.7, seed=7, stop=["a"], top=3, explain=True)
    many: list[Generation] = lm.generate(["x", "y"], max_tokens=3, progress=False)
    ids: list[Generation] = lm.generate([[1, 2], [3]], logit_bias={" Berlin": 2.0, 5: 1.0})
    prompt: Generation = lm.generate([1, 2, 3], logit_bias={5: -1})
    said: Generation = lm.chat("x", json_schema={"type": "object"}, tools=[{"type": "function"}])
    told: Generation = lm.chat([{"role": "user", "content": "x"}], regex="a+", guard="loop")
    both: list[Generation] = lm.chat(["x", "y"], choice=("yes", "no"), temperature=None)

    def stage(tokens: Ids, logits: Logits) -> Logits:
        return logits

    lm.generate("x", stages=["temperature", stage, "top_p"])
    lm.generate("x", stages=[stage, ...])
    for step in lm.stream("x", speculate="lookup", repetition_penalty=1.1):
        print(step.text, step.logprob + 1)
    usual: Options = {"temperature": 0.2, "max_tokens": 5}
    lm.generate("x", **usual)
    best: Generation = lm.best_of("x", 3, scorer=lambda g: len(g.text), **usual).best
    counts = lm.vote("x", 3, extract=r"[0-9]+", top_k=4).counts
    texts: list[Generation] = lm.samples("x", 3, min_p=0.1)
    beam: Generation = lm.beam("x", beams=3, length_penalty=1.0).best
    tree: Generation = lm.search("x", width=2, seed=1).best
    on: Generation = one.rewind(2).choose(" y").resume(temperature=1.0)
    seen = lm.look("x")
    print(lm.logit_lens(seen).layers, lm.attribution("x", -1, against="mean").parts)
    vector: float = float(lm.embed("x")[0])
"""

BAD = {
    'lm.generate("x", temprature=3)': "No overload variant",
    'lm.generate("x", max_new_tokens=3)': "No overload variant",
    'lm.generate("x", temperature="hot")': "No overload variant",
    'lm.generate("x", stop=5)': "No overload variant",
    'lm.generate("x", stages=[lambda: 1])': "has incompatible type",
    "lm.generate(None)": "No overload variant",
    "lm.generate(5)": "No overload variant",
    'lm.stream("x", top_k=0.5)': "incompatible type",
    'lm.stream(["x", "y"])': "incompatible type",
    'lm.chat("x", max_token=5)': "No overload variant",
    'lm.samples("x", 3, seeds=1)': 'Unexpected keyword argument "seeds"',
    'lm.samples("x", "three")': "incompatible type",
    'lm.beam("x", num_beams=3)': 'Unexpected keyword argument "num_beams"',
    'lm.beam("x", early_stopping="often")': "incompatible type",
    'lm.search("x", wide=3)': 'Unexpected keyword argument "wide"',
    'lm.vote("x", 3)': 'Missing named argument "extract"',
    'lm.generate("x").resume(temprature=1)': 'Unexpected keyword argument "temprature"',
    'lm.generate(["x"]).text': 'has no attribute "text"',
    'lm.generate("x").txt': 'has no attribute "txt"',
}


@pytest.mark.timeout(900)
def test_types_of_the_source_and_of_programs_that_use_it(tmp_path: Path):
    """In one run of the type checker, which reads the source for either."""
    lines = ["import unspool", "lm = unspool.load()", *BAD]
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(GOOD)
    bad.write_text("\n".join(lines))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "src/unspool", str(good), str(bad)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert done.returncode == 1 and errors, done.stdout + done.stderr
    assert not [line for line in errors if "bad.py:" not in line]
    for number, (code, words) in enumerate(BAD.items(), start=3):
        reported = [line for line in errors if f"bad.py:{number}: " in line]
        assert any(words in line for line in reported), (code, reported)
