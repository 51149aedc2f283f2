"""llama.cpp's API as its own clients use it: editors, the web UI, and its server's test suite.

The model is a tiny random one with FIM tokens and a chat template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from helpers.api_requests import parse_events
from helpers.running_server import default_entry, running
from helpers.word_model import FIM, TEMPLATE, save_worded
from unspool.sampling import grammar

TEXT = "The scheduler plans rows, and the"
SKY = "The sky is"
NO_END = {"logit_bias": {0: -100}}  # so that a text ends for want of tokens only
TURN = "<|turn|>user\nHi<|endoftext|>\n<|turn|>assistant\n"


@dataclass
class Served:
    client: httpx.Client
    lm: Any

    def post(self, path: str, body: Any) -> Any:
        """The JSON answer to a request that must succeed."""
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, (body, answer.text)
        return answer.json()

    def refusal(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error of a request that must fail."""
        answer = self.client.post(path, json=body)
        assert answer.status_code == status, (body, answer.text)
        error: dict[str, Any] = answer.json()["error"]
        return error

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        answer = self.client.post(path, json=body | {"stream": True})
        assert answer.status_code == 200, (body, answer.text)
        return parse_events(answer.text)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = save_worded(tmp_path_factory.mktemp("coder"), (*FIM, "<|turn|>"))
    settings = folder / "tokenizer_config.json"
    chat = {"chat_template": TEMPLATE}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | chat))

    entry = default_entry(folder, "coder", memory=16 << 20, threads=1)
    with running([entry]) as server:
        yield Served(server.http, server.state.registry.loaded["coder"].lm)


# -- editors -------------------------------------------------------------------------------------

FIM_FIELDS = ["content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms",
              "timings/prompt_per_second", "timings/predicted_n", "timings/predicted_ms",
              "timings/predicted_per_token_ms", "timings/predicted_per_second", "truncated",
              "tokens_cached"]  # fmt: skip
CODE = {"input_prefix": "import os\n\ndef a():\n", "input_suffix": "\n\nprint(a())\n"}
VIM_CHUNK = {"text": "def b():\n    return 1\n", "time": [4711, 123456], "filename": "b.py"}
VSCODE_CHUNK = {"text": "def b():\n", "time": 1755600000000, "filename": "/home/me/b.py"}
VIM = {
    **CODE, "id_slot": 0, "input_extra": [VIM_CHUNK], "prompt": "    ret", "n_predict": 8,
    "stop": [], "n_indent": 4, "top_k": 40, "top_p": 0.90, "samplers": ["top_k", "top_p", "infill"],
    "stream": False, "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 250,
    "response_fields": FIM_FIELDS,
}  # fmt: skip
VSCODE = {
    **CODE, "id_slot": 0, "input_extra": [VSCODE_CHUNK], "prompt": "    ret", "n_predict": 8,
    "n_cmpl": 2, "top_k": 40, "top_p": 0.99, "stream": False,
    "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "n_indent": 4,
    "t_max_prompt_ms": 500, "t_max_predict_ms": 2500,
}  # fmt: skip
VIM_WARM_UP = {
    "id_slot": 0, "input_prefix": "", "input_suffix": "", "input_extra": [VIM_CHUNK], "prompt": "",
    "n_predict": 0, "temperature": 0.0, "samplers": [], "stream": False, "cache_prompt": True,
    "t_max_prompt_ms": 1, "t_max_predict_ms": 1, "response_fields": [""],
}  # fmt: skip
VSCODE_WARM_UP = {
    **CODE, "id_slot": 0, "input_extra": [VSCODE_CHUNK], "prompt": "", "n_predict": 0,
    "samplers": [], "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1,
}  # fmt: skip


def test_llama_vim_fills_a_gap(served):
    answer = served.client.post("/infill", json=VIM)
    assert answer.status_code == 200, answer.text
    assert {*answer.json()} == {*FIM_FIELDS}  # llama.vim reads `timings/prompt_n` by this name
    assert 1 <= answer.json()["timings/predicted_n"] <= 8
    ignored = answer.headers["x-unspool-ignored"].split(", ")
    assert {"t_max_prompt_ms", "t_max_predict_ms", "samplers.infill"} <= {*ignored}
    # temperature and min_p are not listed, so they are not used
    settings = served.post("/infill", {**VIM, "response_fields": [], "temperature": 0})
    assert settings["generation_settings"]["samplers"] == ["top_k", "top_p"]


def test_llama_vscode_fills_a_gap(served):
    pair = served.post("/infill", VSCODE)
    assert [answer["index"] for answer in pair] == [0, 1]
    assert all(1 <= answer["tokens_predicted"] <= 8 for answer in pair)


def test_editors_warm_the_cache_up(served):
    assert served.post("/infill", VIM_WARM_UP) == {}
    prefix = {**VSCODE_WARM_UP, "input_prefix": f"{TEXT} batch builder makes a step of them."}
    warm = served.post("/infill", prefix)
    assert (warm["content"], warm["tokens"], warm["tokens_predicted"]) == ("", [], 0)
    assert warm["timings"]["prompt_n"] > 16 and warm["timings"]["prompt_ms"] > 0
    again = served.post("/infill", {**prefix, "n_predict": 2})
    assert again["timings"]["cache_n"] >= warm["tokens_evaluated"] - 16  # whole pages


def test_llama_vim_edits_by_instruction(served):
    talk = [{"role": "system", "content": "Edit."}, {"role": "user", "content": "INSTRUCTION: x"}]
    warm_up = {"id_slot": 3, "messages": talk, "samplers": [], "n_predict": 0, "stream": False,
               "cache_prompt": True, "response_fields": [""]}  # fmt: skip
    answer = served.post("/v1/chat/completions", warm_up)
    assert answer["usage"]["completion_tokens"] == 0
    body = {"id_slot": 3, "messages": talk, "min_p": 0.1, "temperature": 0.1, "max_tokens": 3,
             "samplers": ["min_p", "temperature"], "cache_prompt": True}  # fmt: skip
    assert served.events("/v1/chat/completions", body)[-1]["choices"][0]["finish_reason"]


@pytest.mark.parametrize(
    "chunk", [{}, {"filename": "a"}, {"filename": 1, "text": "a"}, {"text": 4}, 5]
)
def test_a_chunk_without_text_is_refused(served, chunk):
    served.refusal("/infill", {**CODE, "input_extra": [chunk]})


# -- control tokens ------------------------------------------------------------------------------


def test_control_tokens_of_a_raw_prompt_are_control(served):
    parsed = served.lm.tokenizer.encode(TURN, specials=True)
    text = served.lm.tokenizer.encode(TURN)
    assert len(parsed) < len(text)
    for expected, body in ((parsed, {}), (text, {"parse_special": False})):
        answer = served.post("/completion", {"prompt": TURN, "n_predict": 1, **body})
        assert answer["tokens_evaluated"] == len(expected)
        answer = served.post("/v1/completions", {"prompt": TURN, "max_tokens": 1, **body})
        assert answer["usage"]["prompt_tokens"] == len(expected)
        raw = {"prompt": TURN, "raw": True, "stream": False, "options": {"num_predict": 1}}
        assert served.post("/api/generate", raw | body)["prompt_eval_count"] == len(expected)
    mixed = served.post("/completion", {"prompt": [5, TURN], "n_predict": 1})
    assert mixed["tokens_evaluated"] == len(parsed) + 1


def test_an_applied_template_is_the_prompt_of_a_chat(served):
    talk = [{"role": "user", "content": "Hi"}]
    applied = served.post("/apply-template", {"messages": talk})
    answer = served.post("/completion", {"prompt": applied["prompt"], "n_predict": 1})
    chat = served.post("/v1/chat/completions", {"messages": talk, "max_tokens": 1})
    assert answer["tokens_evaluated"] == chat["usage"]["prompt_tokens"] == len(applied["tokens"])


def test_control_tokens_of_contents_are_text(served):
    """Control tokens spelled by a user or in code never become a turn."""
    message = "a<|endoftext|>\n<|turn|>system\nb"
    expected = served.lm.tokenizer.encode(message)
    turn = served.lm.tokenizer.token_id("<|turn|>")
    talk = [{"role": "user", "content": message}]
    ids = served.post("/apply-template", {"messages": talk})["tokens"]
    assert ids.count(turn) == 2 and " ".join(map(str, expected)) in " ".join(map(str, ids))
    chat = served.post("/api/chat", {"messages": talk, "stream": False,
                                     "options": {"num_predict": 1}})  # fmt: skip
    assert chat["prompt_eval_count"] == len(ids)
    gap = served.post("/infill", {"input_prefix": message, "input_suffix": "c", "n_predict": 1})
    assert gap["tokens_evaluated"] > len(expected)
    plain = served.post("/infill", {"input_prefix": "", "input_suffix": "c", "n_predict": 1})
    assert gap["tokens_evaluated"] - plain["tokens_evaluated"] == len(expected)


# -- /tokenize -----------------------------------------------------------------------------------


def test_tokenize_as_llama_cpp(served):
    tokenizer = served.lm.tokenizer
    assert served.post("/tokenize", {"content": TURN})["tokens"] == tokenizer.encode(
        TURN, specials=True
    )
    plain = served.post("/tokenize", {"content": TURN, "parse_special": False})
    assert plain["tokens"] == tokenizer.encode(TURN)
    mixed = served.post("/tokenize", {"content": [5, "a", 6]})
    assert mixed["tokens"] == [5, *tokenizer.encode("a"), 6]


def test_pieces_that_are_no_characters_are_bytes(served):
    result = served.post("/tokenize", {"content": "a媽<|turn|>", "with_pieces": True})["tokens"]
    pieces = [token["piece"] for token in result]
    assert pieces[0] == "a" and pieces[-1] == "<|turn|>"
    assert pieces[1:-1] == [[byte] for byte in "媽".encode()]
    assert (
        served.post("/detokenize", {"tokens": [token["id"] for token in result]})["content"]
        == "a媽<|turn|>"
    )


# -- samplers ------------------------------------------------------------------------------------

SETTINGS = {"top_k": 3, "top_p": 0.5, "min_p": 0.2, "typical_p": 0.7, "temperature": 0.4,
            "xtc_probability": 0.5, "repeat_penalty": 1.4, "dry_multiplier": 0.8}  # fmt: skip


@pytest.mark.parametrize(
    ("samplers", "intended"),
    [
        (["top_k"], {"top_k": 3, "stages": ("top_k",)}),
        (["top-k", "temp"], {"top_k": 3, "temperature": 0.4, "stages": ("top_k", "temperature")}),
        ("kt", {"top_k": 3, "temperature": 0.4, "stages": ("top_k", "temperature")}),
        ("", {"stages": ()}),
        ([], {"stages": ()}),
        (["min_p", "infill"], {"min_p": 0.2, "stages": ("min_p",)}),
        ("edskypmxt", {}),
    ],
)
def test_samplers_that_are_not_listed_are_not_used(served, samplers, intended):
    params = SETTINGS if intended else {}
    body = {"prompt": TEXT, "n_predict": 8, "seed": 5, "samplers": samplers, **params}
    answer = served.post("/completion", body | {"return_tokens": True})
    expected = served.lm.generate(TEXT, max_tokens=8, seed=5, **intended)
    assert answer["tokens"] == list(expected.tokens)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    served.post("/v1/chat/completions", chat | params | {"samplers": samplers})


def test_mirostat_takes_the_place_of_samplers(served):
    body = {"prompt": TEXT, "n_predict": 8, "seed": 5, "mirostat": 2, "mirostat_tau": 3.0,
            "return_tokens": True, "top_k": 40, "top_p": 0.9, "samplers": ["top_k"]}  # fmt: skip
    expected = served.lm.generate(TEXT, max_tokens=8, seed=5, mirostat_tau=3.0)
    assert served.post("/completion", body)["tokens"] == list(expected.tokens)
    talk = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    served.post("/v1/chat/completions", talk | {"mirostat": 2, "top_k": 40})
    options = {"mirostat": 1, "top_k": 40, "num_predict": 2}
    served.post("/api/generate", {"prompt": "Hi", "stream": False, "options": options})


@pytest.mark.parametrize(
    ("field", "value"),
    [("samplers", 5), ("samplers", [1]), ("samplers", ["top_kk"]), ("samplers", "kz"),
     ("top_k", "x"), ("logit_bias", 5), ("logit_bias", [[5]]), ("logit_bias", [[5, "x"]]),
     ("logit_bias", [[True, 1]]), ("image_data", [{"id": 1}]), ("lora", [{"id": 0}]),
     ("lora", [{"id": 0, "scale": 1.0}]), ("adaptive_target", 0.5), ("n_probs", 5000),
     ("timings_per_token", "yes"), ("prompt", {"prompt_string": 5}), ("grammar_lazy", True),
     ("prompt", {"prompt_string": "a", "multimodal_data": ["x"]}), ("n_predict", "x")],
)  # fmt: skip
def test_what_is_wrong_or_cannot_be_is_refused(served, field, value):
    error = served.refusal(
        "/completion", {"prompt": TEXT, "samplers": ["temperature"], field: value}
    )
    assert error["code"] == 400 and (field in error["message"] or field == "n_predict")


# -- settings that come back ---------------------------------------------------------------------


def test_settings_are_accepted_back(served):
    params = served.client.get("/props").json()["default_generation_settings"]
    assert served.post("/completion", {"prompt": TEXT, **params["params"], "n_predict": 2})
    assert served.post("/completion", {"prompt": TEXT, **params, "n_predict": 2})
    for extra in (
        {"repeat_penalty": 1.3, "top_k": 5, "logit_bias": [["a", False], [7, 1.5]]},
        {"samplers": ["top_k", "temperature"], "ignore_eos": True, "stop": ["zz"]},
        {"mirostat": 2, "mirostat_tau": 4.0},
    ):
        body = {"prompt": TEXT, "n_predict": 6, "seed": 3, **extra}
        first = served.post("/completion", body)
        again = served.post("/completion", {"prompt": TEXT, **first["generation_settings"]})
        assert again["content"] == first["content"]
        assert again["generation_settings"] == first["generation_settings"]


LLAMA_CPP_SETTINGS = {  # as llama.cpp's server reports them
    "seed": 4294967295, "temperature": 0.800000011920929, "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0, "top_k": 40, "top_p": 0.949999988079071,
    "min_p": 0.05000000074505806, "top_n_sigma": -1.0, "xtc_probability": 0.0,
    "xtc_threshold": 0.10000000149011612, "typical_p": 1.0, "repeat_last_n": 64,
    "repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": 131072,
    "dry_sequence_breakers": ["\n", ":", "\"", "*"], "mirostat": 0, "mirostat_tau": 5.0,
    "mirostat_eta": 0.10000000149011612, "adaptive_target": -1.0, "adaptive_decay": 0.9,
    "stop": [], "max_tokens": -1, "n_predict": 3, "n_keep": 0, "n_discard": 0,
    "ignore_eos": False, "stream": False, "logit_bias": [], "n_probs": 0, "min_keep": 0,
    "grammar": "", "grammar_lazy": False, "grammar_triggers": [], "preserved_tokens": [],
    "chat_format": "Content-only", "reasoning_format": "deepseek", "reasoning_in_content": False,
    "generation_prompt": "", "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p",
    "top_p", "min_p", "xtc", "temperature"], "speculative.types": "none",
    "timings_per_token": False, "post_sampling_probs": False, "backend_sampling": False, "lora": [],
}  # fmt: skip


def test_settings_of_llama_cpp_are_accepted(served):
    answer = served.post("/completion", {"prompt": TEXT, "image_data": [], **LLAMA_CPP_SETTINGS})
    assert 1 <= answer["tokens_predicted"] <= 3
    talk = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "lora": [],
            "image_data": [], "thinking_budget_tokens": 5}  # fmt: skip
    served.post("/v1/chat/completions", talk)
    missing = {*LLAMA_CPP_SETTINGS} - {*answer["generation_settings"]}
    assert missing <= {"grammar_lazy", "grammar_triggers", "preserved_tokens", "chat_format",
                       "reasoning_format", "reasoning_in_content", "generation_prompt", "n_keep",
                       "n_discard", "speculative.types", "backend_sampling"}  # fmt: skip


def test_biases_by_text(served):
    (letter,) = served.lm.tokenizer.encode("q")
    body = {"prompt": TEXT, "n_predict": 1, "temperature": 0, "return_tokens": True}
    for bias in ([["q", 500]], [[letter, 500.0]], {"q": 500}, {str(letter): 500.0},
                 [{"token": letter, "bias": 500}]):  # fmt: skip
        assert served.post("/completion", body | {"logit_bias": bias})["tokens"] == [letter], bias
    best = served.post("/completion", body | {"logit_bias": []})["tokens"]
    for never in ([[best[0], False]], [{"token": best[0], "bias": None}]):
        assert served.post("/completion", body | {"logit_bias": never})["tokens"] != best


def test_end_tokens_are_forbidden_where_ignored(served):
    body = {"prompt": TEXT, "n_predict": 2, "temperature": 0}
    assert served.post("/completion", body)["generation_settings"]["logit_bias"] == []
    settings = served.post("/completion", body | {"ignore_eos": True})["generation_settings"]
    forbidden = {entry["token"] for entry in settings["logit_bias"] if entry["bias"] is None}
    assert forbidden == {*served.lm.end_ids}


# -- chats ---------------------------------------------------------------------------------------

CHAT = {"messages": [{"role": "user", "content": "The scheduler plans rows. " * 12}],
        "max_tokens": 6, "temperature": 0, "logit_bias": {"0": -100}}  # fmt: skip


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions", "/v1/completions"])
def test_timings_of_chats(served, path):
    body = CHAT if "chat" in path else {**CHAT, "prompt": TEXT}
    body = {name: value for name, value in body.items() if name != "messages" or "chat" in path}
    timings = served.post(path, body)["timings"]
    assert timings["predicted_n"] == 6 and timings["prompt_n"] + timings["cache_n"] > 5
    assert timings["prompt_ms"] > 0 and timings["predicted_per_second"] > 0
    stream = body | {"stream_options": {"include_usage": True}}
    timed = served.events(path, stream | {"timings_per_token": True})
    numbers = [event["timings"]["predicted_n"] for event in timed if "timings" in event]
    assert numbers == sorted(numbers) and numbers[0] >= 1 and numbers[-1] == 6
    assert "timings" in timed[-1] and timed[-1]["choices"] == []
    if "chat" in path:
        assert timed[0]["choices"][0]["delta"]["role"] and "timings" not in timed[0]
    plain = [event for event in served.events(path, stream) if "timings" in event]
    assert len(plain) == 2  # the last one of the choice, and the one with the usage


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
def test_progress_of_prompts(served, path):
    prompt = f"{path} " + "Tokens may be provisional. " * 24
    body = {"prompt": prompt, "max_tokens": 2, "return_progress": True, "timings_per_token": True}
    if "chat" in path:
        body |= {"messages": [{"role": "user", "content": body.pop("prompt")}]}
    for is_cached in (False, True):
        events = served.events(path, body)
        progress = [event for event in events if "prompt_progress" in event]
        assert progress and progress == events[: len(progress)]
        reports = [event["prompt_progress"] for event in progress]
        assert reports[0]["processed"] == reports[0]["cache"]
        assert (reports[0]["cache"] > 100) == is_cached
        assert reports[-1]["processed"] == reports[-1]["total"] > 100
        done = [report["processed"] for report in reports]
        assert done == sorted({*done})
        assert progress[0]["timings"]["prompt_n"] == 0 == progress[0]["timings"]["prompt_ms"]
        assert progress[-1]["timings"]["prompt_n"] == done[-1] - done[0]
    assert "timings" not in served.events(path, body | {"timings_per_token": False})[0]


def test_a_chat_as_text_and_counted(served):
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    answer = served.post("/chat/completions", {**body, "max_tokens": 1, "verbose": True})
    assert answer["__verbose"]["prompt"] == TURN
    plain = served.post("/chat/completions", {**body, "max_tokens": 1, "verbose": False})
    assert "__verbose" not in plain
    count = served.post("/chat/completions/input_tokens", body)["input_tokens"]
    assert count == answer["usage"]["prompt_tokens"]
    closed = served.post("/apply-template", {**body, "add_generation_prompt": False})
    assert closed["prompt"] + "<|turn|>assistant\n" == TURN


def test_forms_of_prompts(served):
    """Texts, ids, both mixed, and objects; one prompt or several."""
    ids = served.lm.prompt_ids(TEXT)
    body = {"n_predict": 4, "temperature": 0, "return_tokens": True}
    expected = list(served.lm.generate(TEXT, max_tokens=4, temperature=0).tokens)
    for prompt in (TEXT, ids, [*ids[:-1], " the"], {"prompt_string": TEXT}):
        assert served.post("/completion", {"prompt": prompt, **body})["tokens"] == expected, prompt
    several = served.post("/completion", {"prompt": [TEXT, ids, {"prompt_string": TEXT}], **body})
    assert [answer["tokens"] for answer in several] == [expected] * 3
    named = {
        **body,
        "ignore_eos": True,
        "max_completion_tokens": 2,
        "n_predict": None,
        "logprobs": 3,
    }
    answer = served.post("/completion", {"prompt": TEXT, **named})
    assert [len(p["top_logprobs"]) for p in answer["completion_probabilities"]] == [3, 3]


# -- paths and errors ----------------------------------------------------------------------------


def test_paths(served):
    get = served.client.get
    assert get("/models").json() == get("/v1/models").json()
    assert get("/v1/health").json() == get("/health").json() == {"status": "ok"}
    assert get("/metrics").status_code == 200 and get("/slots").json()[0]["n_ctx"] == 512
    assert served.post("/chat/completions", CHAT)["choices"][0]["finish_reason"] == "length"
    body = {"prompt": TEXT, "n_predict": 2, "ignore_eos": True}
    assert served.post("/completions", body)["tokens_predicted"] == 2
    assert served.post("/responses", {"input": "Hi", "max_output_tokens": 2})["id"]
    assert get("/lora-adapters").json() == []
    for scales in ([], [{"id": 0, "scale": 0.0}]):
        assert served.post("/lora-adapters", scales) == {"success": True}
    served.refusal("/lora-adapters", [{"id": 0, "scale": 1.0}])
    served.refusal("/lora-adapters", {"id": 0, "scale": 1.0})


def test_embeddings(served):
    openai = served.post("/v1/embeddings", {"input": ["a b", "c"]})
    vectors = [row["embedding"] for row in openai["data"]]
    for path in ("/embedding", "/embeddings"):
        result = served.post(path, {"input": ["a b", "c"]})
        assert [row["index"] for row in result] == [0, 1]
        for row, vector in zip(result, vectors, strict=True):
            assert row["embedding"] == [pytest.approx(vector, abs=1e-4)]
    ids = served.lm.tokenizer.encode("a b")
    for content in ("a b", ids, [ids[0], served.lm.tokenizer.decode(ids[1:])]):
        (row,) = served.post("/embedding", {"content": content})
        assert row["embedding"] == [pytest.approx(vectors[0], abs=1e-4)]
    (row,) = served.post("/embedding", {"content": "a b", "embd_normalize": 1})
    assert sum(map(abs, row["embedding"][0])) == pytest.approx(1)
    (row,) = served.post("/embedding", {"content": "a b", "embd_normalize": 0})
    assert max(map(abs, row["embedding"][0])) == pytest.approx(32760)
    served.refusal("/embedding", {})
    served.refusal("/embedding", {"content": "a" * 9999})


@pytest.mark.parametrize(
    ("path", "field"),
    [("/completion", "prompt"), ("/v1/completions", "prompt"), ("/chat/completions", "messages"),
     ("/v1/chat/completions", "messages"), ("/embedding", "content"), ("/infill", "input_prefix")],
)  # fmt: skip
@pytest.mark.parametrize("count", [600, 99_999])
def test_a_prompt_that_is_too_long(served, path, field, count):
    text = " a" * count
    content = [{"role": "user", "content": text}] if field == "messages" else text
    body = {field: content, "input_suffix": "b"} if path == "/infill" else {field: content}
    for streams in ({}, {"stream": True}) if path != "/embedding" else ({},):
        error = served.refusal(path, body | streams)
        assert error["n_ctx"] == 512 and error["n_prompt_tokens"] > 512
        if path.startswith("/v1"):
            assert error["code"] == "context_length_exceeded"
        else:
            assert (error["code"], error["type"]) == (400, "exceed_context_size_error")


# -- /completion ---------------------------------------------------------------------------------


def test_a_text_is_continued(served):
    body = {"prompt": SKY, "n_predict": 8, "seed": 7, "cache_prompt": True, "id_slot": -1}
    reply = served.client.post("/completion", json=body | NO_END)
    result, created = reply.json(), served.lm.generate(SKY, max_tokens=8, seed=7, **NO_END)
    assert result["content"] == created.text and result["model"] == "coder"
    assert (result["tokens_predicted"], result["tokens_evaluated"]) == (8, len(created.prompt))
    assert (result["stop"], result["stop_type"], result["truncated"]) == (True, "limit", False)
    assert result["prompt"] == SKY and result["tokens"] == []
    assert result["generation_settings"]["seed"] == 7
    assert result["timings"]["predicted_n"] == 8 and result["timings"]["predicted_per_second"] > 0
    assert reply.headers["x-unspool-ignored"] == "cache_prompt, id_slot"


def test_it_streams_in_its_own_way(served):
    body = {"prompt": SKY, "n_predict": 8, "temperature": 0, "stream": True, **NO_END}
    reply = served.client.post("/completion", json=body).text
    chunks = parse_events(reply)
    created = served.lm.generate(SKY, temperature=0, max_tokens=8, **NO_END)
    assert "".join(chunk["content"] for chunk in chunks) == created.text
    assert [token for chunk in chunks for token in chunk["tokens"]] == list(created.tokens)
    assert [chunk["stop"] for chunk in chunks] == [False] * 8 + [True]
    assert chunks[-1]["timings"] and "[DONE]" not in reply
    assert not any("prompt_progress" in chunk or "timings" in chunk for chunk in chunks[:-1])


def test_probabilities(served):
    options = {"temperature": 0.9, "seed": 3, **NO_END}
    body = {"prompt": SKY, "n_predict": 3, "n_probs": 150, **options}
    created = served.lm.generate(SKY, max_tokens=3, explain=True, **options)
    for expected, name in (({}, "logprob"), ({"post_sampling_probs": True}, "prob")):
        result = served.post("/completion", body | expected)["completion_probabilities"]
        assert [item["id"] for item in result] == [step.token for step in created.steps]
        values = [s.probability if expected else s.logprob for s in created.steps]
        assert [item[name] for item in result] == pytest.approx(values, abs=1e-4)
        assert expected or all(len(item["top_logprobs"]) == 150 for item in result)


def test_grammars_and_stops(served, monkeypatch):
    monkeypatch.setattr(grammar, "_CACHE_SIZE", 1)
    body = {"prompt": SKY, "n_predict": 40, "seed": 1}
    result = served.post("/completion", body | {"grammar": 'root ::= "blue" | "red"'})
    assert result["content"] in ("blue", "red") and result["stop_type"] == "eos"
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    result = served.post("/completion", body | {"json_schema": schema})
    assert {*json.loads(result["content"])} == {"ok"}
    result = served.post("/completion", body | {"grammar": 'root ::= "red blue"', "stop": [" b"]})
    assert (result["content"], result["stop_type"]) == ("red", "word")
    assert result["stopping_word"] == " b"
    body |= {"samplers": ["top_k", "temperature"], "logit_bias": [[5, False]], "ignore_eos": True}
    fields = {"response_fields": ["content", "timings/predicted_n"]}
    result = served.post("/completion", body | fields)
    assert {*result} == {"content", "timings/predicted_n"}  # llama.cpp keeps the path
    assert result["timings/predicted_n"] == 40


def test_what_can_be_read(served):
    props = served.client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 512 and props["total_slots"] == 64
    assert props["chat_template"] == TEMPLATE and props["eos_token"] == "<|endoftext|>"
    slots = served.client.get("/slots").json()
    assert len(slots) == 64 and not slots[0]["is_processing"]
    assert "--slot-save-path" in served.refusal("/slots/0?action=erase", {}, status=501)["message"]
    for path in ("/props",):
        assert "read-only" in served.refusal(path, {}, status=501)["message"]
