"""`unspool models plan --gpus N`: what fits where, from a model's settings alone."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from helpers.catalogue_shapes import SHAPES
from helpers.tiny_gguf import write_tiny
from unspool.cli.main import _exit_code
from unspool.errors import SettingsError
from unspool.model.files.config_json import config_from_hf
from unspool.model.hub.inspect import PROCESS, plan_memory
from unspool.model.hub.memory import parse_size
from unspool.model.weights import parameter_count

GB = 1_000_000_000


def ways(name: str, gpus: int, memory: int) -> dict[str, Any]:
    config = config_from_hf(SHAPES[name])
    result = plan_memory(config, gpus=gpus, memory=memory, packed=2 * parameter_count(config))
    return {fit.how.split()[0]: fit for fit in result}


def test_a_model_of_seventy_billion_on_four():
    """By hand: 80 layers, 8 key heads of 128, keys and values of 2 bytes each."""
    result = ways("llama3.3-70b", 4, 80 * GB)
    assert result["one"].tokens == 0 and result["one"].token == 80 * 2 * 8 * 128 * 2
    split = result["split"]
    assert split.token == result["one"].token // 4
    assert split.weights == pytest.approx(result["one"].weights / 4, rel=0.01)
    assert split.tokens == (80 * GB - PROCESS - split.weights) // 2 // split.token
    layers = result["layers"]
    assert split.weights <= layers.weights < 1.1 * split.weights
    assert 0 < layers.tokens <= split.tokens
    assert split.texts(8192) == split.tokens // 8192


def test_key_heads_and_recurrent_states_are_split():
    result = ways("llama3.3-70b", 16, 80 * GB)
    assert result["split"].token == result["one"].token // 8, "two ranks share a key head"
    state_bytes = config_from_hf(SHAPES["qwen3.5-9b"]).state_bytes
    result = ways("qwen3.5-9b", 2, 24 * GB)
    assert (result["one"].state, result["split"].state) == (state_bytes, state_bytes // 2)


def test_what_cannot_be_split_is_said():
    result = ways("smollm2-135m", 2, 8 * GB)
    assert result["split"].problem == "cannot be: it has 9 heads"
    assert "too many" in ways("gpt2", 64, 8 * GB)["layers"].problem


def test_sizes():
    sizes = {
        "80GB": 80 * GB,
        "24 GiB": 24 << 30,
        "500m": GB // 2,
        "1.5g": GB * 3 // 2,
        "1024": 1024,
    }
    assert {words: parse_size(words) for words in sizes} == sizes
    for words in ("much", "0GB", "-3GB", "", "3XB"):
        with pytest.raises(SettingsError, match="size must be"):
            parse_size(words)


@pytest.fixture
def settings(tmp_path: Path) -> str:
    """A folder with nothing but the settings of a model."""
    shape = {**SHAPES["llama3.3-70b"], "max_position_embeddings": 131072}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return str(tmp_path)


def test_the_command(settings: str, capsys: pytest.CaptureFixture[str]):
    arguments = ["models", "plan", settings, "--gpus", "4", "--memory", "80GB", "--context", "8192"]
    assert _exit_code([*arguments, "--batch", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("llama · 70.6 billion parameters, 141.1 GB in 16 bits")
    assert lines[1] == "4 GPUs of 80.0 GB · texts of 8,192 tokens · 8 in parallel"
    assert "no: the weights leave no memory" in next(x for x in lines if x.startswith("one GPU"))
    assert next(x for x in lines if x.startswith("split over 4 GPUs")).endswith("yes")
    assert lines[-1].startswith("Split over 4 GPUs: --tensor-parallel 4")
    assert _exit_code([*arguments, "--batch", "1000"]) == 0
    assert "Nothing fits" in capsys.readouterr().out
    assert _exit_code([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [way["how"] for way in report["ways"]][2] == "split over 4 GPUs"


def test_a_small_one_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_tiny(tmp_path / "tiny.gguf")
    assert _exit_code(["models", "plan", str(path), "--gpus", "2", "--memory", "8GB"]) == 0
    assert "One GPU is enough: --device cuda" in capsys.readouterr().out


def test_what_makes_no_sense(settings: str, capsys: pytest.CaptureFixture[str]):
    for given, words in (
        (["--gpus", "0"], "--gpus must be >= 1, got 0"),
        (["--gpus", "5000", "--memory", "1GB"], "--gpus must be <= 1,024, got 5000"),
        (["--gpus", "2", "--memory", "lots"], "size must be"),
        (["--context", "0"], "--context must be >= 1, got 0"),
    ):
        assert _exit_code(["models", "plan", settings, *given]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.real
def test_the_guide(settings: str, capsys: pytest.CaptureFixture[str]):
    """Its plans are run; what it shows is what the command says; its options are there."""
    path = Path(__file__).parents[2] / "docs/how-to/run-a-model-on-several-gpus.md"
    page = path.read_text(encoding="utf-8")
    plans, *starts = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    for line in plans.splitlines():
        assert _exit_code(shlex.split(line)[1:]) == 0
    (displayed,) = re.findall(r"```\n\$ (.*?)```", page, re.DOTALL)
    command, _, table = displayed.partition("\n")
    arguments = [
        settings if word == "llama-3.3-70b/" else word for word in shlex.split(command)[1:]
    ]
    capsys.readouterr()
    assert _exit_code(arguments) == 0
    assert capsys.readouterr().out == table
    assert all("--model large/" in line for block in starts for line in block.splitlines())
    for option in ("--tensor-parallel", "--devices"):
        assert option in "".join(starts)
        for name in ("run", "serve"):
            assert _exit_code([name, "--help"]) == 0
            assert option in capsys.readouterr().out
