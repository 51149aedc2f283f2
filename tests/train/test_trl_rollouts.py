"""docs/how-to/train-with-trl.md on a tiny model: TRL trains, our server writes the rollouts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import unspool
from helpers import small_model as small
from helpers.running_server import running
from unspool.server.runtime.registry import AdapterFolder, ModelEntry

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "train-with-trl.md"


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    small.save_model(folder, max_position_embeddings=128)
    return folder


@pytest.fixture
def server(model_folder: Path, tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "adapters").mkdir()

    def load() -> Any:
        return unspool.load(model_folder, backend="torch", memory=16 << 20)

    entry = ModelEntry("tiny", load, 1 << 20)
    adapters = AdapterFolder(tmp_path / "adapters")
    with running([entry], adapters=adapters) as running_server:
        yield running_server


def test_the_recipe(
    server: Any, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    definitions, training = block.split("\ntrainer = GRPOTrainer(")
    definitions = re.sub(r'SERVER = "[^"]+"', f'SERVER = "{server.url}"', definitions)
    definitions = re.sub(r'MODEL = "[^"]+"', f'MODEL = "{model_folder}"', definitions)
    names: dict[str, Any] = {}
    exec(compile(definitions, "train-with-trl.md", "exec"), names)

    rollouts: list[tuple[dict[str, Any], list[list[float]]]] = []
    original = names["rollout"]

    def checked(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Compare the server's log-probabilities with those of the model that is trained."""
        output = original(prompts, trainer)
        expected = []
        with torch.no_grad():
            for prompt, completion in zip(
                output["prompt_ids"], output["completion_ids"], strict=True
            ):
                logits = trainer.model(torch.tensor([prompt + completion])).logits[0]
                rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
                expected.append(rows.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist())
        rollouts.append((output, expected))
        return output

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text))) for text in completions]

    names["rollout"], names["reward"] = checked, reward
    # CPU for TRL too, wherever the tests run.
    training = training.replace('report_to="none"', 'report_to="none", use_cpu=True')
    training = training.replace("max_completion_length=32", "max_completion_length=8")
    exec(compile("trainer = GRPOTrainer(" + training, "train-with-trl.md", "exec"), names)

    assert len(rollouts) == 4
    for output, expected in rollouts:  # on policy: each step's adapter was used
        assert len(output["completion_ids"]) == 4
        for actual, reference in zip(output["logprobs"], expected, strict=True):
            assert actual == pytest.approx(reference, abs=2e-3)
    assert len({tuple(ids) for ids in rollouts[0][0]["completion_ids"]}) > 1  # choices differ
    names_served = [model["id"] for model in server.http.get("/v1/models").json()["data"]]
    assert names_served == ["tiny", "tiny:policy"]
    weights = (tmp_path / "adapters" / "policy" / "adapter_model.safetensors").read_bytes()
    assert len(weights) > 1000
