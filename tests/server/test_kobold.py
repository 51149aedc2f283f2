"""KoboldAI's API: the requests that SillyTavern and mikupad make, taken from their code."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from helpers.running_server import wait_until

PROMPT = "The sky is"
# mikupad.html (completion, koboldCppConvertOptions): the defaults, all samplers turned on.
MIKUPAD = {
    "prompt": PROMPT, "sampler_seed": 7, "temperature": 0.7, "dynatemp_range": 0,
    "dynatemp_exponent": 1, "rep_pen": 1.1, "rep_pen_range": 256, "penalize_nl": False,
    "use_default_badwordsids": False, "presence_penalty": 0, "frequency_penalty": 0, "top_p": 0.95,
    "top_k": 40, "typical": 1, "min_p": 0, "tfs": 1, "xtc_threshold": 0.1, "xtc_probability": 0,
    "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n", ":", '"', "*"], "banned_tokens": [], "max_length": 12,
    "logprobs": 10, "stream": True, "stop_sequence": ["###"], "logit_bias": {"5": -1.5},
}  # fmt: skip
# SillyTavern, src/endpoints/backends/kobold.js: what its server sends for "KoboldAI Classic".
TAVERN = {
    "prompt": PROMPT, "use_story": False, "use_memory": False, "use_authors_note": False,
    "use_world_info": False, "max_context_length": 2048, "max_length": 12, "rep_pen": 1.1,
    "rep_pen_range": 600, "rep_pen_slope": 0, "temperature": 0.5, "tfs": 1, "top_a": 0, "top_k": 0,
    "top_p": 0.95, "min_p": 0, "typical": 1, "sampler_order": [6, 0, 1, 3, 4, 2, 5],
    "singleline": False, "use_default_badwordsids": False, "mirostat": 0, "mirostat_eta": 0.1,
    "mirostat_tau": 5, "grammar": "", "sampler_seed": 3, "stop_sequence": ["\nYou:", "\n### "],
}  # fmt: skip
# SillyTavern, public/scripts/textgen-settings.js (getTextGenGenerationData) for "Text Completion:
# KoboldCpp", which its server sends to /v1/completions as it is.
TEXTGEN = {
    "prompt": PROMPT, "max_new_tokens": 12, "max_tokens": 12, "temperature": 0.7,
    "top_p": 0.5, "typical_p": 1, "typical": 1, "sampler_seed": 3, "min_p": 0,
    "repetition_penalty": 1.2, "frequency_penalty": 0, "presence_penalty": 0, "top_k": 40,
    "skew": 0, "min_tokens": 0, "add_bos_token": True, "smoothing_factor": 0, "smoothing_curve": 1,
    "dry_allowed_length": 2, "dry_multiplier": 0, "dry_base": 1.75,
    "dry_sequence_breakers": '["\\n", ":", "\\"", "*"]', "dry_penalty_last_n": 0,
    "max_tokens_second": 0, "stopping_strings": ["\nYou:"], "stop": ["\nYou:"],
    "truncation_length": 2048, "ban_eos_token": False, "skip_special_tokens": True, "top_a": 0,
    "tfs": 1, "mirostat_mode": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "custom_token_bans": "",
    "banned_strings": [], "api_type": "koboldcpp", "api_server": "http://127.0.0.1:5001/",
    "legacy_api": False, "sampler_order": [6, 0, 1, 3, 4, 2, 5], "xtc_threshold": 0.1,
    "xtc_probability": 0, "grammar": "", "rep_pen": 1.2, "rep_pen_range": 0,
    "repetition_penalty_range": 0, "seed": 3, "guidance_scale": 1, "negative_prompt": "",
    "grammar_string": "", "repeat_penalty": 1.2, "tfs_z": 1, "repeat_last_n": 0, "n_predict": 12,
    "num_predict": 12, "num_ctx": 2048, "mirostat": 0, "ignore_eos": False, "rep_pen_slope": 1,
    "stream": True,
}  # fmt: skip


def events(text: str) -> list[dict[str, Any]]:
    """As clients read them: pairs of `event: message` and `data: {...}`."""
    parts = [part.split("\n") for part in text.split("\n\n") if part]
    assert all(len(part) == 2 and part[0] == "event: message" for part in parts)
    return [json.loads(data.removeprefix("data: ")) for _, data in parts]


def test_connecting(http, lm):
    """SillyTavern asks for these when it connects; with /api at the end of its address."""
    assert http.get("/api/v1/info/version").json() == {"result": "1.2.5"}
    version = http.get("/api/extra/version").json()
    assert version["result"] == "KoboldCpp" and float(version["version"]) >= 1.43
    model = http.get("/api/v1/model").json()["result"]
    assert model == http.get("/v1/models").json()["data"][0]["id"]
    for path in ("/api/v1/config/max_context_length", "/api/extra/true_max_context_length"):
        assert http.get(path).json() == {"value": lm.context}
    assert http.get("/api/v1/config/max_length").json()["value"] <= lm.context
    count = http.post("/api/extra/tokencount", json={"prompt": PROMPT}).json()
    assert count["value"] == len(count["ids"])
    assert count["ids"][1:] == lm.tokenizer.encode(PROMPT)  # mikupad drops the first
    plain = http.post("/api/extra/tokencount", json={"prompt": PROMPT, "special": False}).json()
    assert plain["ids"] == lm.tokenizer.encode(PROMPT)
    assert http.get("/api/tags").json()["models"]  # Ollama's API stays


def test_mikupad(http, lm):
    options = {"temperature": 0.7, "repetition_penalty": 1.1, "penalty_window": 256, "top_p": 0.95,
               "top_k": 40, "min_p": 0.0, "seed": 7, "max_tokens": 12, "stop": ["###"],
               "logit_bias": {5: -1.5}}  # fmt: skip
    expected = lm.generate(PROMPT, **options)
    answer = http.post("/api/extra/generate/stream", json=MIKUPAD)
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = events(answer.text)
    assert "".join(chunk["token"] for chunk in chunks) == expected.text
    assert chunks[-1] == {"token": "", "finish_reason": expected.finish_reason}
    for chunk in chunks[:-1]:
        assert chunk["finish_reason"] is None and 10 <= len(chunk["top_logprobs"]) <= 11
        # It looks the token up by its text, to show its probability.
        top = [c["logprob"] for c in chunk["top_logprobs"] if c["token"] == chunk["token"]]
        assert top == [chunk["logprob"]]
    result = http.post("/api/v1/generate", json={**MIKUPAD, "stream": False}).json()["results"][0]
    assert result["text"] == expected.text and result["completion_tokens"] == len(expected.steps)
    content = result["logprobs"]["content"]
    assert "".join(item["token"] for item in content) == expected.text
    assert content[0]["top_logprobs"] == chunks[0]["top_logprobs"]


def test_sillytavern(http, lm):
    expected = lm.generate(
        PROMPT, temperature=0.5, repetition_penalty=1.1, penalty_window=600, top_k=0, top_p=0.95,
        min_p=0.0, seed=3, max_tokens=12, stop=["\nYou:", "\n### "],
    )  # fmt: skip
    answer = http.post("/api/v1/generate", json=TAVERN)
    (result,) = answer.json()["results"]
    assert result["text"] == expected.text and result["logprobs"] is None
    assert answer.headers["x-unspool-ignored"] == "rep_pen_slope"
    chunks = events(http.post("/api/extra/generate/stream", json=TAVERN).text)
    assert "".join(chunk["token"] for chunk in chunks) == expected.text
    assert all(set(chunk) == {"token", "finish_reason"} for chunk in chunks)
    latest = http.post("/api/latest/generate", json=TAVERN).json()
    assert latest["results"][0]["text"] == expected.text


def test_sillytavern_text_completion(http, lm):
    expected = lm.generate(
        PROMPT, temperature=0.7, repetition_penalty=1.2, top_k=40, top_p=0.5, min_p=0.0, seed=3,
        max_tokens=12, stop=["\nYou:"],
    )  # fmt: skip
    answer = http.post("/v1/completions", json=TEXTGEN | {"stream": False})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == expected.text
    assert "x-unspool-ignored" not in answer.headers
    lines = http.post("/v1/completions", json=TEXTGEN).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected.text
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"
    other = http.post("/v1/completions", json=TEXTGEN | {"stream": False, "top_a": 0.5})
    assert other.headers["x-unspool-ignored"] == "top_a"


def test_settings_mean_what_they_mean_there(http, lm):
    base = {"prompt": PROMPT, "max_length": 10, "sampler_seed": 5}

    def text(**settings: Any) -> str:
        answer = http.post("/api/v1/generate", json=base | settings)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["results"][0]["text"])

    plain = {"temperature": 0.7, "top_k": 100, "top_p": 0.92, "min_p": 0.0, "penalty_window": 320,
             "seed": 5, "max_tokens": 10}  # fmt: skip
    assert text() == lm.generate(PROMPT, **plain).text
    # A sampler that the order leaves out is off; DRY is first and XTC last.
    order = lm.generate(
        PROMPT, temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, dry_multiplier=0.8, dry_window=320,
        xtc_probability=0.5, xtc_threshold=0.05, seed=5, max_tokens=10,
        stages=["logit_bias", "dry", "dynamic_temperature", "temperature", "typical_p", "xtc"],
        typical_p=0.9,
    )  # fmt: skip
    given = {"temperature": 1.5, "dry_multiplier": 0.8, "xtc_probability": 0.5, "typical": 0.9,
             "xtc_threshold": 0.05, "sampler_order": [5, 4],
             "dry_sequence_breakers": "[]"}  # fmt: skip
    assert text(**given) == order.text
    mirostat = lm.generate(
        PROMPT, temperature=0.7, seed=5, max_tokens=10, mirostat_tau=3.0, mirostat_eta=0.2
    )
    assert text(mirostat=2, mirostat_tau=3.0, mirostat_eta=0.2) == mirostat.text
    assert text(temperature=0) == lm.generate(PROMPT, temperature=0, max_tokens=10).text
    grammar = text(grammar='root ::= "yes" | "no"')
    assert grammar in ("yes", "no")
    first = lm.generate(PROMPT, temperature=0, max_tokens=10)
    banned = text(temperature=0, custom_token_bans=f" {first.tokens[0]}, x")
    assert banned == lm.generate(PROMPT, temperature=0, max_tokens=10,
                                 logit_bias={first.tokens[0]: float("-inf")}).text  # fmt: skip
    word = first.text.split()[0]
    assert word not in text(temperature=0, banned_strings=[word]).split()
    ids = [*lm.tokenizer.encode_prompt("It rains. "), *lm.tokenizer.encode(PROMPT)]
    with_memory = text(temperature=0, memory="It rains. ")
    assert with_memory == lm.generate(ids, temperature=0, max_tokens=10).text


def test_a_long_prompt_loses_its_beginning(http, lm):
    words = " word" * 100 + PROMPT
    ids = lm.tokenizer.encode_prompt(words)
    body = {"prompt": words, "max_length": 4, "max_context_length": 40, "temperature": 0}
    (result,) = http.post("/api/v1/generate", json=body).json()["results"]
    bos = ids[:1] if ids[0] == lm.tokenizer.bos_id else []
    kept = [*bos, *ids[len(ids) - 36 + len(bos) :]]
    assert result["prompt_tokens"] == 36
    assert result["text"] == lm.generate(kept, temperature=0, max_tokens=4).text
    longer = http.post("/api/v1/generate", json={**body, "prompt": "a " * (4 * lm.context)})
    assert longer.status_code == 200 and longer.json()["results"][0]["prompt_tokens"] == 36


def test_check_and_abort(server, http):
    """The text so far, and stopping it: only with its key, and only one's own."""
    body = {"prompt": PROMPT, "max_length": 400, "ban_eos_token": True, "genkey": "KCPP1"}
    done: list[dict[str, Any]] = []

    def generate() -> None:
        answer = httpx.post(f"{server.url}/api/v1/generate", json=body, timeout=60)
        done.append(answer.json()["results"][0])

    def pending(**keys: Any) -> str:
        answer = http.post("/api/extra/generate/check", json=keys).json()
        return str(answer["results"][0]["text"])

    thread = threading.Thread(target=generate)
    thread.start()
    wait_until(lambda: pending(genkey="KCPP1"))
    assert pending() == pending(genkey="other") == ""
    assert http.get("/api/extra/generate/check").json() == {"results": [{"text": ""}]}
    assert http.post("/api/extra/abort").json()["success"] == "false"  # SillyTavern: no body
    stopped = http.post("/api/extra/abort", json={"genkey": "KCPP1"}).json()
    assert stopped == {"success": "true", "done": "true"}
    thread.join(30)
    assert done[0]["completion_tokens"] < 400 and done[0]["text"]
    assert pending(genkey="KCPP1") == ""


BAD = [
    ({"max_length": -1}, "max_length"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"dry_sequence_breakers": "["}, "dry_sequence_breakers"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"mirostat": 7}, "mirostat"),
    ({"grammar": "root ::= ("}, "grammar"),
]


@pytest.mark.parametrize(("fields", "name"), BAD, ids=[name for _, name in BAD])
def test_errors_have_the_form_of_koboldcpp(http, fields, name):
    for path in ("/api/v1/generate", "/api/extra/generate/stream"):
        answer = http.post(path, json={"prompt": PROMPT, "max_length": 2, **fields})
        assert answer.status_code == 400, answer.text
        assert name in answer.json()["detail"]["msg"]
    unknown = {"prompt": PROMPT, "max_length": 1, "no_such_setting": 1, "n": 3}
    assert http.post("/api/v1/generate", json=unknown).status_code == 200  # ignored, as there
