"""Hidden states over HTTP: `unspool.return.hidden_states`."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from unspool.server.runtime import hidden_states

OPTIONS = {"max_tokens": 5, "seed": 5, "temperature": 0.9, "top_k": 0}


def extension(**fields: Any) -> dict[str, Any]:
    return {"unspool": {"return": {"hidden_states": fields}}}


def decode(array: dict[str, Any]) -> Any:
    kind = {"float32": "<f4", "float16": "<f2"}[array["dtype"]]
    return np.frombuffer(base64.b64decode(array["data"]), kind).reshape(array["shape"])


def test_hidden_states_of_a_completion(http: Any, lm: Any):
    generated = lm.generate("We", **OPTIONS)
    expected = lm.activations(generated, sites=["resid_post", "logits"], layers=[0, -1])
    fields = {"sites": ["resid_post", "logits"], "layers": [0, -1], "positions": "all"}
    body = {"prompt": ["We", "The"], "n": 2, **OPTIONS, **extension(**fields)}
    reply = http.post("/v1/completions", json=body).json()
    assert reply["choices"][0]["text"] == generated.text
    choices = reply["unspool"]["choices"]
    assert len(choices) == 4
    states = choices[0]["hidden_states"]
    assert states["positions"] == list(range(len(expected.tokens)))
    residual = states["arrays"]["resid_post"]
    last = lm.config.layers - 1
    assert residual["layers"] == [0, last]
    assert residual["names"] == ["blocks.0.hook_resid_post", f"blocks.{last}.hook_resid_post"]
    np.testing.assert_allclose(decode(residual), expected["resid_post"], rtol=1e-5, atol=1e-5)
    logits = states["arrays"]["logits"]
    assert logits["layers"] is None and logits["names"] == ["hook_logits"]
    np.testing.assert_allclose(decode(logits), expected["logits"], rtol=1e-5, atol=1e-5)


def test_chat_stream_and_half_precision(http: Any, lm: Any):
    messages = [{"role": "user", "content": "Name a colour."}]
    answer = lm.chat(messages, **OPTIONS)
    expected = lm.activations(answer, sites="blocks.0.hook_attn_out", positions="last")
    fields = {"sites": ["blocks.0.hook_attn_out"], "dtype": "float16"}
    body = {"messages": messages, **OPTIONS, **extension(**fields)}
    reply = http.post("/v1/chat/completions", json=body).json()
    states = reply["unspool"]["choices"][0]["hidden_states"]
    assert states["positions"] == [len(expected.tokens) - 1]
    array = decode(states["arrays"]["attn_out"])
    assert array.dtype == np.float16
    np.testing.assert_allclose(array, expected["attn_out"], rtol=2e-3, atol=1e-3)
    streamed = http.post("/v1/chat/completions", json={**body, "stream": True}).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert events[-1]["unspool"]["choices"][0]["hidden_states"] == states
    body = {"model": "smollm", "messages": messages, "max_tokens": 5}
    body |= {"temperature": 0.9, "top_k": 0, **extension(**fields)}
    body["unspool"]["seed"] = 5
    reply = http.post("/v1/messages", json=body).json()
    assert reply["unspool"]["choices"][0]["hidden_states"] == states


def test_they_carry_the_interventions_of_the_text(http: Any, lm: Any):
    zero = {"site": "mlp_out", "op": {"kind": "scale", "factor": 0}}
    body = {"prompt": "We", **OPTIONS, **extension(sites=["mlp_out"], layers=[1])}
    body["unspool"]["interventions"] = [zero]
    reply = http.post("/v1/completions", json=body).json()
    states = reply["unspool"]["choices"][0]["hidden_states"]
    assert not decode(states["arrays"]["mlp_out"]).any()


def test_prompts_without_a_text(http: Any, lm: Any):
    expected = lm.activations("We are", sites="final_norm", positions=[0, -1])
    fields = {"sites": ["final_norm"], "positions": [-1, 0]}
    body = {"prompt": "We are", "max_tokens": 0, **extension(**fields)}
    reply = http.post("/v1/completions", json=body).json()
    states = reply["unspool"]["choices"][0]["hidden_states"]
    assert states["positions"] == list(expected.positions)
    array = decode(states["arrays"]["final_norm"])
    np.testing.assert_allclose(array, expected["final_norm"], rtol=1e-5, atol=1e-5)
    reply = http.post(
        "/v1/embeddings", json={"input": ["We are", "You"], **extension(**fields)}
    ).json()
    first, second = reply["unspool"]["hidden_states"]
    assert first == states and second["positions"][0] == 0
    fields["positions"] = "generated"
    body = {"prompt": "We are", "max_tokens": 0, **extension(**fields)}
    states = http.post("/v1/completions", json=body).json()["unspool"]["choices"][0]
    assert states["hidden_states"] == {"positions": [], "arrays": {}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sites": ["soul"]}, "there is no site 'soul'"),
        ({"sites": []}, "sites"),
        ({"sites": "resid_post"}, "sites"),
        ({"layers": [99]}, "layers"),
        ({"layers": []}, "layers"),
        ({"layers": [True]}, "must be numbers"),
        ({"positions": "first"}, "positions"),
        ({"positions": []}, "positions"),
        ({"positions": [7000]}, "positions"),
        ({"sites": ["blocks.0.hook_soul"]}, "no hook is called"),
        ({"sites": ["mlp_hidden"]}, "needs the torch backend"),
        ({"dtype": "int8"}, "dtype"),
        ({"shape": 1}, "shape"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_clear_sentence(http: Any, fields: dict[str, Any], message: str):
    for path, body in (
        ("/v1/completions", {"prompt": "We", "max_tokens": 1}),
        ("/v1/embeddings", {"input": "We"}),
    ):
        answer = http.post(path, json={**body, **extension(**fields)})
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["error"]["message"]


def test_limits_and_other_endpoints(http: Any, monkeypatch: pytest.MonkeyPatch):
    def refused(path: str, body: dict[str, Any], **fields: Any) -> str:
        answer = http.post(path, json={**body, **extension(**fields)})
        assert answer.status_code == 400, answer.text
        message: str = answer.json()["error"]["message"]
        return message

    body: dict[str, Any] = {"prompt": "We", "max_tokens": 5}
    assert "is for /v1/completions" in refused("/completion", body)
    assert (
        "not for branches"
        in http.post("/v1/tree", json={"prompt": "We", **extension()["unspool"]}).text
    )
    think = {"messages": [{"role": "user", "content": "Hi"}], **extension()}
    think["unspool"]["think"] = {"policy": "best-of"}
    assert "cannot be combined" in http.post("/v1/chat/completions", json=think).text
    endless = {**body, **extension()}
    endless["unspool"]["endless"] = True
    assert "endless" in http.post("/v1/completions", json=endless).json()["error"]["message"]
    monkeypatch.setattr(hidden_states, "MAX_NUMBERS", 100)
    for positions in ("all", "generated"):  # known before the text, and only after it
        assert "at most 100 are allowed" in refused("/v1/completions", body, positions=positions)
