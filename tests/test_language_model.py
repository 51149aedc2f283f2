"""The face of the model: what people call, and what it gives them."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
import pickle
import pty
import pydoc
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

import unspool
from unspool import BatchError, ContextError, SettingsError, UnspoolError

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def lm(small_lm: Any) -> Any:
    return small_lm


def test_every_lens_is_a_method(tiny_lm: Any):
    look = tiny_lm.look(PROMPT, 2)
    assert look.position == 2 and look.picked == PROMPT[3]
    lens, again = tiny_lm.logit_lens(look), tiny_lm.logit_lens(PROMPT, 2)
    assert lens.token == again.token == PROMPT[3]
    assert tiny_lm.attribution(look).token == tiny_lm.attribution(PROMPT, 2).token == PROMPT[3]
    assert len(tiny_lm.neighbours(7, 3)) == 3
    assert np.linalg.norm(tiny_lm.embed(PROMPT)) == pytest.approx(1, abs=1e-5)


def test_a_text_is_saved_and_written_again(tiny_lm: Any, tmp_path: Path):
    text = tiny_lm.generate(PROMPT, max_tokens=5, seed=2, top=2, explain=True)
    text.save(tmp_path / "trace.json")
    for trace in (tiny_lm.trace(text), tmp_path / "trace.json", str(tmp_path / "trace.json")):
        result = tiny_lm.replay(trace)
        assert result.exact
        assert result.generation.tokens == text.tokens


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_new_tokens", 40, "write max_tokens=40"),
        ("num_predict", 40, "write max_tokens=40"),
        ("do_sample", False, "temperature=0"),
        ("n", 3, r"lm\.samples\(prompt, 3\)"),
        ("num_beams", 4, r"lm\.beam\(prompt, beams=4\)"),
        ("repeat_penalty", 1.1, r"write repetition_penalty=1\.1"),
        ("return_full_text", True, "only the new text"),
        ("eos_token_id", 2, "end=False"),
        ("pad_token_id", 0, "leave it out"),
        ("stop_sequences", ["x"], r"write stop=\['x'\]"),
        ("top_logprobs", 5, "top=5"),
        ("logits_processor", [], r"stages=\[your_function, \.\.\.\]"),
        ("bad_words_ids", [], r"logit_bias=\{' word'"),
        ("stream", True, r"lm\.stream"),
        ("messages", [], r"lm\.chat\(\[\{'role'"),
        ("system_prompt", "Hi", r"lm\.chat\(question, system='Hi'\)"),
        ("temprature", 1, "did you mean 'temperature'"),
        ("max_token", 1, "did you mean 'max_tokens'"),
        ("top-p", 1, "did you mean 'top_p'"),
        ("zzzz", 1, r"help\(lm\.generate\)"),
    ],
)
def test_names_from_elsewhere_are_answered_with_ours(
    tiny_lm: Any, name: str, value: Any, words: str
):
    text = tiny_lm.generate(PROMPT, max_tokens=2, seed=1)
    for ask in (tiny_lm.generate, tiny_lm.stream, tiny_lm.search):
        with pytest.raises(SettingsError, match=f"no option '{name}'.*{words}"):
            ask(PROMPT, **{name: value})
    with pytest.raises(SettingsError, match=words):
        text.resume(**{name: value})


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (None, r"prompt must be text, token ids.*got None"),
        (123, r"prompt must be text.*got 123"),
        (b"Once", r"got bytes b.Once.; use prompt.decode"),
        ([{"role": "user", "content": "Hi"}], r"use lm.chat\(messages\)"),
        ([1.5, 2.5], "prompt 0: prompt must be text.*got 1.5"),
        ([], "the prompt is empty"),
        ([5, 259], "token 259 is not in the vocabulary"),
        ([-1], "token -1"),
    ],
)
def test_what_is_no_prompt_is_told_so(tiny_lm: Any, prompt: Any, words: str):
    with pytest.raises(UnspoolError, match=words):
        tiny_lm.generate(prompt)


@pytest.mark.parametrize("messages", [None, 5, b"Hi", [5], [["Hi"]], [{"role": "user"}, 5]])
def test_what_is_no_conversation_is_told_so(lm: Any, messages: Any):
    with pytest.raises(SettingsError, match=r"messages must be a question, or a"):
        lm.chat(messages)


@pytest.fixture(scope="module")
def chat_lm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small random model with a vocabulary and a chat template."""
    from helpers import small_model

    folder = tmp_path_factory.mktemp("chat-lm")
    small_model.save_model(folder)
    return unspool.load(folder, memory=8 << 20)


WRITE: dict[str, Any] = {"max_tokens": 6, "seed": 4, "end": False}


def picky(tokens: Any, logits: Any) -> Any:
    """A stage that fails for one prompt."""
    if tokens[0] == 6 and len(tokens) == 4:
        raise RuntimeError("not this one")
    return logits


def test_a_conversation_can_be_streamed(chat_lm: Any):
    talk = [{"role": "user", "content": "Is it strong?"}]
    answer = chat_lm.chat(talk, **WRITE)
    assert [step.token for step in chat_lm.stream(talk, **WRITE)] == answer.tokens
    assert [s.token for s in chat_lm.stream("Is it strong?", **WRITE)] != answer.tokens
    formal = chat_lm.chat("Is it strong?", system="Be formal.", **WRITE)
    streamed = chat_lm.stream("Is it strong?", system="Be formal.", **WRITE)
    assert [step.token for step in streamed] == formal.tokens
    with pytest.raises(SettingsError, match="messages must be"):
        chat_lm.stream([*talk, 5], **WRITE)


def test_a_chat_takes_a_system_message(chat_lm: Any):
    question = {"role": "user", "content": "Is it strong?"}
    system = {"role": "system", "content": "Be formal."}
    prompt = chat_lm.chat([system, question], **WRITE).prompt
    assert chat_lm.chat("Is it strong?", system="Be formal.", **WRITE).prompt == prompt
    assert chat_lm.chat([question], system="Be formal.", **WRITE).prompt == prompt
    several = chat_lm.chat(["Is it strong?", "Is it?"], system="Be formal.", **WRITE)
    assert several[0].prompt == prompt and several[1].prompt != prompt
    with pytest.raises(SettingsError, match="messages start with a system message"):
        chat_lm.chat([system, question], system="Be brief.")
    with pytest.raises(SettingsError, match="system must be text, got 5"):
        chat_lm.chat("Is it?", system=5)


def test_texts_are_awaited_without_blocking_the_event_loop(chat_lm: Any):
    """The engine's thread waits until the event loop has run."""

    async def ask() -> list[Any]:
        release = threading.Event()
        chat_lm.engine.loop.post(lambda: release.wait(10), at_rest=False)
        requests = [
            chat_lm.agenerate("The state", **WRITE),
            chat_lm.achat("Is it?", system="Be formal.", **WRITE),
            chat_lm.agenerate(["The state", [5, 6]], **WRITE),
        ]
        asyncio.get_running_loop().call_later(0.05, release.set)
        return await asyncio.wait_for(asyncio.gather(*requests), 60)

    text, answer, texts = asyncio.run(ask())
    assert text.tokens == texts[0].tokens == chat_lm.generate("The state", **WRITE).tokens
    assert answer.tokens == chat_lm.chat("Is it?", system="Be formal.", **WRITE).tokens
    assert texts[1].tokens == chat_lm.generate([5, 6], **WRITE).tokens
    assert text.finish_reason == "length"


def test_cancelling_the_task_cancels_its_requests(chat_lm: Any):
    async def cancel(prompt: Any) -> None:
        task = asyncio.create_task(
            chat_lm.agenerate(prompt, endless=True, max_tokens=10**9, end=False)
        )
        while not chat_lm.engine.loop.has_work():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(60):
            while chat_lm.engine.loop.has_work():
                await asyncio.sleep(0.01)

    asyncio.run(cancel([5, 6]))
    asyncio.run(cancel([[5, 6], [7, 8]]))


def test_an_awaited_batch_tells_what_went_wrong(chat_lm: Any):
    with pytest.raises(BatchError, match=r"1 of 2 .* number 1: .*not this one") as caught:
        asyncio.run(chat_lm.agenerate([[5, 1], [6, 1]], stages=[picky, ...], **WRITE))
    assert [len(text.tokens) for text in caught.value.generations] == [6, 2]
    with pytest.raises(SettingsError, match="no option 'temprature'"):
        asyncio.run(chat_lm.agenerate([5, 6], temprature=1))


def test_a_list_of_texts_is_embedded_row_by_row(chat_lm: Any):
    vectors = chat_lm.embed(["The state", "of the union"])
    assert vectors.shape == (2, chat_lm.config.width)
    assert np.array_equal(vectors[1], chat_lm.embed("of the union"))
    ids = chat_lm.embed([[5, 6, 7], [8]])
    assert np.array_equal(ids[0], chat_lm.embed([5, 6, 7])) and ids[0].ndim == 1
    with pytest.raises(UnspoolError, match="text 1: the prompt is empty"):
        chat_lm.embed(["The state", ""])


def test_lenses_name_tokens_by_text(chat_lm: Any):
    token = chat_lm.single_token(" st")
    attribution = chat_lm.attribution("The", token=" st", against="ate")
    assert (attribution.token, attribution.against) == (token, chat_lm.single_token("ate"))
    assert (
        attribution.logit
        == chat_lm.attribution("The", token=token, against=attribution.against).logit
    )
    assert chat_lm.attribution("The", token=token, against="mean").against == "mean"
    assert chat_lm.logit_lens("The", token=" st").token == token
    with pytest.raises(SettingsError, match=r"'xyzzy' must be one token, got \d tokens"):
        chat_lm.attribution("The", token="xyzzy")


def test_arguments_of_the_wrong_type_are_named(chat_lm: Any):
    lm, prompt = chat_lm, "The state"
    text = lm.generate(prompt, **WRITE)
    wrong: dict[str, list[Any]] = {
        "explain": [lambda: lm.generate(prompt, explain="yes")],
        "end": [lambda: lm.generate(prompt, end=1), lambda: lm.beam(prompt, end="x")],
        "cache": [lambda: lm.generate(prompt, cache="x"), lambda: text.resume(cache="x")],
        "json": [lambda: lm.generate(prompt, json="x")],
        "guard": [lambda: lm.generate(prompt, guard=3), lambda: text.resume(guard=[3])],
        "tools": [lambda: lm.chat(prompt, tools=5), lambda: lm.chat(prompt, tools=["x"])],
        "top": [lambda: lm.score(prompt, top="x"), lambda: lm.score(prompt, top=-1),
                lambda: text.alternatives(0, top=1.5)],
        "adapter": [lambda: lm.score(prompt, adapter=5)],
        "length": [lambda: text.rewind("x"), lambda: text.rewind(1.5), lambda: text.rewind(None)],
        "index": [lambda: text.alternatives("x"), lambda: text.alternatives(None)],
        "the chosen token": [lambda: text.choose(1.5), lambda: text.choose(None),
                             lambda: text.choose(["a"]), lambda: text.choose(True)],
        "diversity_penalty": [lambda: lm.beam(prompt, diversity_penalty="x")],
        "length_penalty": [lambda: lm.beam(prompt, length_penalty=float("nan"))],
        "threshold": [lambda: lm.edit("A.", threshold="x"), lambda: lm.edit("A.", threshold=2)],
        "trust": [lambda: lm.edit("The cat.", trust="x"), lambda: lm.edit("The cat.", trust=-1)],
        "twin": [lambda: lm.edit("The cat.", twin=5), lambda: lm.fill("The ___.", twin="x")],
        "generation": [lambda: lm.trace(5), lambda: lm.attach(5)],
        "trace": [lambda: lm.replay(5)],
    }  # fmt: skip
    for name, calls in wrong.items():
        for number, call in enumerate(calls):
            with pytest.raises(SettingsError, match=f"^{name} must be") as caught:
                call()
            assert "got " in str(caught.value), (name, number)
    with pytest.raises(SettingsError, match=r"choices must be .*got 5"):
        lm.fill("The ___.", choices=5)
    with pytest.raises(SettingsError, match="at least one word"):
        text.choose("")


@pytest.mark.parametrize("ask", ["stream", "look", "score"])
def test_only_generate_and_chat_take_lists(tiny_lm: Any, ask: str):
    with pytest.raises(SettingsError, match="generate and chat also take a list of prompts"):
        getattr(tiny_lm, ask)([[5, 6], [7, 8]])


def test_none_is_the_usual_value(tiny_lm: Any):
    from unspool.engine.request import NAMES

    usual = tiny_lm.generate(PROMPT, seed=3)
    text = tiny_lm.generate(PROMPT, **{**dict.fromkeys(NAMES), "seed": 3})
    assert text.request == usual.request and text.tokens == usual.tokens
    assert text.rewind(2).resume(**dict.fromkeys(NAMES)).tokens == text.tokens


def test_the_options_are_listed_once_and_completely(tiny_lm: Any):
    """What is typed is what is accepted: every name builds a request, every setting has a name."""
    from unspool.engine.request import NAMES, Options, SamplingOptions
    from unspool.sampling import SamplingSettings

    fields = {field.name: field.default for field in dataclasses.fields(SamplingSettings)}
    assert {*SamplingOptions.__annotations__} == {*fields} - {"seed"}
    # No grammar: the tiny model has no vocabulary.
    values = dict.fromkeys(("json", "json_schema", "regex", "choice", "grammar")) | {
        "speculate": "lookup", "guard": "loop", "stop": "x", "logit_bias": {3: 1.0}, "seed": 1,
        "mirostat_tau": 0.0, "max_tokens": 3, "sample": 1, "top": 2, "explain": True, "end": False,
        "priority": 1, "cache": True,
    }  # fmt: skip
    tiny_lm.prepare_generation(
        PROMPT, **{name: values.get(name, fields.get(name)) for name in NAMES}
    )
    hints = get_type_hints(Options, include_extras=True)
    for name in fields.keys() - {"seed"}:
        default = re.search(r"\(([^()]+)\)$", hints[name].__metadata__[0])  # as help states it
        if default:
            assert float(default[1].replace("True", "1")) == fields[name], name


def test_help_tells_the_options():
    methods = "generate agenerate stream chat achat samples best_of vote search"
    for method in methods.split():
        function = getattr(unspool.LanguageModel, method)
        output = pydoc.render_doc(function, renderer=pydoc.plaintext)
        for words in ("temperature=None", "temperature          randomness", "max_tokens     "):
            assert words in output
    assert "temperature" in inspect.signature(unspool.LanguageModel.generate).parameters


def test_a_list_of_prompts_is_one_batch(tiny_lm: Any):
    prompts = [[5, 6, 7, n, n + 1] for n in range(9, 15)]
    options: dict[str, Any] = {"max_tokens": 12, "seed": 4, "end": False, "temperature": 1.5}
    alone = [tiny_lm.generate(prompt, **options).tokens for prompt in prompts]
    tiny_lm.engine.call(tiny_lm.engine.tree.index.clear)
    before = tiny_lm.engine.steps
    texts = tiny_lm.generate(prompts, **options)
    # What all share, their prompts, twelve tokens; a few more where not all were batched.
    assert tiny_lm.engine.steps - before <= 14 + 6 < 6 * 12
    assert isinstance(texts, list)
    assert [text.tokens for text in texts] == alone
    assert [list(text.prompt) for text in texts] == prompts
    assert texts[3].rewind(4).resume().tokens == alone[3]
    arrays = tiny_lm.generate(np.array(prompts), **options)
    assert [text.tokens for text in arrays] == alone
    assert [t.tokens for t in tiny_lm.generate(tuple(map(tuple, prompts)), **options)] == alone
    assert len({text.seed for text in tiny_lm.generate(prompts, max_tokens=1)}) > 1


def test_more_prompts_than_may_wait(tiny_lm: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("unspool.decoding.batch._MAX_SUBMITTED", 4)
    prompts = [[5, n] for n in range(40)]
    texts = tiny_lm.generate(prompts, max_tokens=3, seed=1)
    assert [list(text.prompt) for text in texts] == prompts


def test_a_prompt_that_cannot_be_is_named_before_anything_runs(tiny_lm: Any):
    tiny_lm.generate(PROMPT, max_tokens=1)
    before = tiny_lm.engine.steps
    for bad, kind in (([], UnspoolError), ([9999], UnspoolError), (list(range(200)), ContextError)):
        with pytest.raises(kind, match="prompt 1: "):
            tiny_lm.generate([[5, 6], bad, [7]])
    assert tiny_lm.engine.steps == before


def test_what_goes_wrong_with_one_leaves_the_others(tiny_lm: Any):
    options: dict[str, Any] = {"stages": [picky, ...], "max_tokens": 5, "seed": 2, "end": False}
    with pytest.raises(BatchError, match=r"1 of 3 .* number 1: .*not this one") as caught:
        tiny_lm.generate([[5, 1], [6, 1], [7, 1]], **options)
    texts = caught.value.generations
    assert [len(text.tokens) for text in texts] == [5, 2, 5]
    assert list(caught.value.errors) == [1]
    assert texts[2].tokens == tiny_lm.generate([7, 1], **options).tokens
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.generations[0].tokens == texts[0].tokens


def test_lists_of_questions_and_of_conversations(lm: Any):
    questions = ["Name a colour.", "Name an animal."]
    alone = [lm.chat(question, max_tokens=6, seed=1).text for question in questions]
    assert [t.text for t in lm.chat(questions, max_tokens=6, seed=1)] == alone
    talks = [[{"role": "user", "content": question}] for question in questions]
    assert [t.text for t in lm.chat(talks, max_tokens=6, seed=1)] == alone
    assert lm.chat(talks[1], max_tokens=6, seed=1).text == alone[1]
    texts = lm.generate(["Once upon", "The sky"], max_tokens=4, seed=1)
    assert texts[1].text == lm.generate("The sky", max_tokens=4, seed=1).text


_INTERRUPTED = """
import signal, sys, threading, time
import unspool
lm = unspool.load(sys.argv[1], memory=64 << 20)
for prompt in ([[5, n] for n in range(20)], [5, 6]):
    threading.Timer(0.5, lambda: signal.raise_signal(signal.SIGINT)).start()
    try:
        while True:
            lm.generate(prompt, max_tokens=2000, end=False)
    except KeyboardInterrupt:
        engine = lm.engine
        deadline = time.monotonic() + 60
        while engine.loop.has_work() and time.monotonic() < deadline:
            time.sleep(0.01)
        print("running", engine.loop.has_work())
print(len(lm.generate([1, 2], max_tokens=4, end=False).tokens))
"""


def test_an_interrupt_leaves_nothing_running(small_default: Path):
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED, str(small_default)],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.stdout.split() == ["running", "False"] * 2 + ["4"], done.stderr
    assert "Traceback" not in done.stderr


_SLOW_BATCH = """
import sys, time
from unspool.progress import progress_bar
with progress_bar("writing", 30, show="hide" not in sys.argv) as tell:
    for done in range(30):
        tell(done)
        time.sleep(float(sys.argv[1]))
print("done")
"""


@pytest.mark.parametrize("arguments", [["0.06"], ["0.06", "hide"]])
def test_a_terminal_shows_a_bar_after_a_second(arguments: list[str]):
    master, slave = pty.openpty()
    command = [sys.executable, "-c", _SLOW_BATCH, *arguments]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=slave, text=True)
    os.close(slave)
    output = b""
    try:
        while piece := os.read(master, 65536):
            output += piece
    except OSError:  # the other end is closed
        pass
    os.close(master)
    assert child.communicate()[0] == "done\n"
    is_shown = "hide" not in arguments
    assert (b"writing" in output) == is_shown and (b"/30" in output) == is_shown


def test_no_bar_in_a_file():
    command = [sys.executable, "-c", _SLOW_BATCH, "0.06"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_a_model_closes_with_its_block(tiny_lm: Any):
    with unspool.LanguageModel(tiny_lm.model, None, memory=1 << 20) as lm:
        text = lm.generate(PROMPT, max_tokens=2)
        engine = lm.engine
    assert not engine.loop.alive
    lm.close()
    for use in (lambda: lm.generate(PROMPT), text.resume, lambda: lm.look(PROMPT)):
        with pytest.raises(UnspoolError, match=r"this model was closed; load it again"):
            use()
    with (
        pytest.raises(UnspoolError, match="closed"),
        unspool.LanguageModel(tiny_lm.model, None, memory=1 << 20) as never,
    ):
        never.close()
        never.generate(PROMPT)


def test_a_bias_names_tokens_by_text(lm: Any):
    (token,) = lm.tokenizer.encode(" Berlin")
    options: dict[str, Any] = {"max_tokens": 3, "temperature": 0}
    by_text = lm.generate("The sky is", logit_bias={" Berlin": 100}, **options)
    assert by_text.tokens == [token] * 3
    assert by_text.tokens == lm.generate("The sky is", logit_bias={token: 100}, **options).tokens
    free = by_text.rewind(0).resume(logit_bias={" Berlin": float("-inf")})
    assert token not in free.tokens
    with pytest.raises(
        SettingsError, match=r"' Berlinish' must be one token, got \d tokens: ' Berlin'"
    ):
        lm.generate("x", logit_bias={" Berlinish": 1})
    with pytest.raises(SettingsError, match=f"names token {token} twice"):
        lm.generate("x", logit_bias={" Berlin": 1, token: 2})
    with pytest.raises(SettingsError, match="got 0 tokens"):
        lm.generate("x", logit_bias={"": 1})
