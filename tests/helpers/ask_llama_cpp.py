"""Ask llama.cpp about a GGUF file: log-probabilities, token ids, a conversation as text.

Run in a separate process, because llama.cpp exits if it cannot use a file:
python ask_llama_cpp.py MODEL < {"prompts": [[ids]], "texts": [...], "messages": [...]}
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any


def ask(model: Path, **questions: Any) -> dict[str, Any]:
    """What llama.cpp says: `logprobs` [prompts, vocabulary], `ids` of texts, `written` messages."""
    done = subprocess.run(
        [sys.executable, __file__, model],
        input=json.dumps(questions), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    import xllamacpp as llama

    settings = llama.CommonParams()
    settings.model.path = sys.argv[1]
    settings.n_ctx, settings.n_parallel, settings.warmup = 256, 1, False
    settings.use_jinja, settings.verbosity = True, -1
    settings.cpuparams.n_threads = 1
    # In 32 bits throughout, so that the difference to others is rounding only.
    settings.cache_type_k = settings.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = llama.Server(settings)
    questions = json.load(sys.stdin)
    result: dict[str, Any] = {"logprobs": []}
    for prompt in questions.get("prompts", []):
        request = {"prompt": prompt, "n_predict": 1, "n_probs": 1_000_000, "cache_prompt": False}
        # It tells of tokens that it shows, so it has to pick a letter, which changes no figure.
        answer = server.handle_completions({**request, "logit_bias": [["A", 1000]]})
        best = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        result["logprobs"].append(
            [single["logprob"] for single in sorted(best, key=lambda x: x["id"])]
        )
    if questions.get("texts"):
        result["ids"] = [
            _post(server, "tokenize", content=text, parse_special=False)["tokens"]
            for text in questions["texts"]
        ]
    if questions.get("messages"):
        result["written"] = _post(server, "apply-template", messages=questions["messages"])[
            "prompt"
        ]
    print(json.dumps(result), flush=True)
    os._exit(0)  # closing the server takes seconds


def _post(server: Any, path: str, **content: Any) -> Any:
    request = urllib.request.Request(
        f"{server.listening_address}/{path}",
        json.dumps(content).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
