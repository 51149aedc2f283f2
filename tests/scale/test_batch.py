"""`unspool batch` on this machine: input, output and failed rows."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import unspool
from helpers.batch_support import batch, read_lines, some_rows, write_rows
from unspool.errors import DataError
from unspool.scale.batch.rows import read_rows, row_seed, scan_input


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def test_each_row_is_the_text_that_it_is_alone(files: tuple[Path, Path], chatty: Path):
    rows, output = files
    inputs = some_rows(9)
    write_rows(rows, inputs)
    assert batch(chatty, rows, output, "--raw", "--carry", "prompt") == 0
    answers = read_lines(output)
    lm = unspool.load(chatty)
    assert len(answers) == 9
    for number, (row, answer) in enumerate(zip(inputs, answers, strict=True), 1):
        row_id = row.get("id", number)
        options = {"max_tokens": 12} | {
            n: row[n] for n in row if n in ("max_tokens", "temperature")
        }
        options["seed"] = row_seed(7, json.dumps(row_id))
        prompt: Any = row.get("prompt")
        alone = lm.generate(prompt, **options) if prompt else lm.chat(row["messages"], **options)
        assert answer["id"] == row_id
        assert answer["text"] == alone.answer
        assert answer["completion_tokens"] == len(alone.tokens)
        assert answer["finish_reason"] == alone.finish_reason
        assert answer["seed"] == options["seed"]
        assert answer.get("prompt") == prompt
    lm.close()


def test_prompts_are_questions_where_the_model_answers(files: tuple[Path, Path], chatty: Path):
    rows, output = files
    question = {"role": "user", "content": "What is a node?"}
    messages = [{"role": "system", "content": "Be brief."}, question]
    inputs = [{"prompt": "What is a node?", "id": "a"}, {"messages": messages, "id": "b"}]
    write_rows(rows, [{**row, "seed": 3} for row in inputs])
    assert batch(chatty, rows, output, "--system", "Be brief.") == 0
    first, second = read_lines(output)
    assert first["text"] == second["text"] and first["prompt_tokens"] == second["prompt_tokens"]


def test_the_order_and_the_company_of_rows_do_not_matter(
    files: tuple[Path, Path], chatty: Path, monkeypatch: pytest.MonkeyPatch
):
    rows, output = files
    inputs = [{**row, "id": f"row {number}"} for number, row in enumerate(some_rows(8))]
    write_rows(rows, inputs)
    assert batch(chatty, rows, output) == 0
    first = read_lines(output)
    write_rows(rows, reversed(inputs))
    monkeypatch.setattr("unspool.scale.batch.job.MAX_ROWS", 2)
    assert batch(chatty, rows, output, "--restart", "--threads", "1") == 0
    assert read_lines(output) == first[::-1]


def test_bad_rows_are_set_aside(
    files: tuple[Path, Path], chatty: Path, capsys: pytest.CaptureFixture[str]
):
    rows, output = files
    bad = {
        "not a JSON object": [1, 2],
        "neither prompt nor messages": {"id": "empty"},
        "both prompt and messages": {"prompt": "a", "messages": []},
        "did you mean 'temperature'": {"prompt": "a", "temprature": 1},
        "--carry topic": {"prompt": "a", "topic": "trees"},
        "temperature": {"prompt": "a", "temperature": -1},
        "context holds": {"prompt": "a " * 2000},
        "prompt is empty": {"prompt": []},
        "must be a string, or a list": {"messages": [1]},
        "must be a string or an integer": {"prompt": "a", "id": 1.5},
        "is not unique": {"prompt": "again", "id": "good"},
    }
    write_rows(rows, [{"prompt": "A node", "id": "good"}, *bad.values()])
    with rows.open("a") as file:
        file.write('\n{"prompt": "cut o\n')
    assert batch(chatty, rows, output, "--raw") == 1
    (answer,) = read_lines(output)
    assert answer["id"] == "good"
    failed = read_lines(output.with_name("out.errors.jsonl"))
    assert [line["row"] for line in failed] == [*range(2, 13), 14]
    for (message, row), line in zip(bad.items(), failed, strict=False):
        assert message in line["error"] and line["given"] == row, line
    assert "not JSON" in failed[-1]["error"] and failed[-1]["given"] == '{"prompt": "cut o'
    assert "1 of 13 rows answered, 12 failed" in capsys.readouterr().err


def test_a_finished_batch_run_again_does_nothing(
    tmp_path: Path, chatty: Path, capsys: pytest.CaptureFixture[str]
):
    rows, output = write_rows(tmp_path / "in.jsonl", some_rows(3)), tmp_path / "out.jsonl"
    assert batch(chatty, rows, output) == 0
    answers = output.read_bytes()
    capsys.readouterr()
    assert batch(chatty, rows, output) == 0
    assert "nothing to do: 3 rows in" in capsys.readouterr().err
    assert output.read_bytes() == answers and not list(tmp_path.glob("*.unfinished"))
    assert batch(chatty, rows, output, "--temperature", "0.3") == 2
    assert "temperature None (now 0.3)" in capsys.readouterr().err
    write_rows(rows, some_rows(4))
    assert batch(chatty, rows, output) == 2
    assert "different input content" in capsys.readouterr().err
    assert batch(chatty, rows, output, "--restart") == 0
    assert len(read_lines(output)) == 4
    output.write_text("mine")
    assert batch(chatty, rows, output) == 2 and output.read_text() == "mine"


def test_parquet_in_and_out(tmp_path: Path, chatty: Path):
    import pyarrow
    from pyarrow import parquet

    inputs = [
        {**row, "id": 10 + number, "topic": "trees", "parts": [number]}
        for number, row in enumerate(some_rows(6))
    ]
    names = {name: None for row in inputs for name in row}
    columns = {name: [row.get(name) for row in inputs] for name in names}
    parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")
    carried = ("--carry", "topic", "--carry", "parts")
    assert batch(chatty, tmp_path / "in.parquet", tmp_path / "out.parquet", *carried) == 0
    write_rows(tmp_path / "in.jsonl", inputs)
    assert batch(chatty, tmp_path / "in.jsonl", tmp_path / "out.jsonl", *carried) == 0
    table = parquet.read_table(tmp_path / "out.parquet")
    assert str(table.schema.field("id").type) == "int64"
    lines = [{**row, "parts": json.loads(row["parts"])} for row in table.to_pylist()]
    assert lines == read_lines(tmp_path / "out.jsonl")
    # A column of mixed types becomes JSON.
    mixed = [{"prompt": "a", "id": "x", "topic": 1}, {"prompt": "b", "topic": "n"}]
    rows = write_rows(tmp_path / "mixed.jsonl", mixed)
    assert batch(chatty, rows, tmp_path / "mixed.parquet", "--carry", "topic") == 0
    table = parquet.read_table(tmp_path / "mixed.parquet").to_pylist()
    assert [(row["id"], row["topic"]) for row in table] == [("x", "1"), ("2", "n")]


def test_what_is_refused_at_once(tmp_path: Path, chatty: Path, capsys: pytest.CaptureFixture[str]):
    rows = write_rows(tmp_path / "in.jsonl", some_rows(1))
    output = tmp_path / "out.jsonl"
    (tmp_path / "there.jsonl").write_text("mine")
    (tmp_path / "none.jsonl").write_text("\n\n")
    for message, files in {
        "must end in .jsonl or .parquet": (rows, tmp_path / "out.csv"),
        "no such file": (tmp_path / "nowhere.jsonl", output),
        "has no rows": (tmp_path / "none.jsonl", output),
        "already exists": (rows, tmp_path / "there.jsonl"),
        "both INPUT and OUTPUT": (rows, rows),
        "there is no folder": (rows, tmp_path / "no" / "out.jsonl"),
    }.items():
        assert batch(chatty, *files) == 2
        assert message in capsys.readouterr().err
    assert batch(chatty, rows, output, "--workers", "2") == 2
    assert "add --ray" in capsys.readouterr().err
    assert batch(chatty, rows, output, "--temperature", "-1") == 2
    assert (tmp_path / "there.jsonl").read_text() == "mine"
    assert not output.exists() and not list(tmp_path.glob("*.unfinished"))


def test_rows_are_numbered_as_an_editor_does_and_a_damaged_file_is_told(tmp_path: Path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b", "id": null}\n')
    assert [(row.number, row.id) for row in read_rows(path)] == [(1, 1), (3, 3)]
    assert scan_input(path).rows == 2
    (tmp_path / "in.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        scan_input(tmp_path / "in.parquet")


def test_the_guide(tmp_path: Path, chatty: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    """Run the commands of the page on batch jobs; those for a cluster have only valid options."""
    import typer.main

    from unspool.cli.main import _exit_code, app_with

    path = Path(__file__).parents[2] / "docs" / "how-to" / "batch-jobs.md"
    page = path.read_text(encoding="utf-8")
    (rows,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    here, cluster = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text(rows)
    for line in here.splitlines():
        assert _exit_code([*shlex.split(line)[1:], "-m", str(chatty)]) == 0
    assert [row["id"] for row in read_lines(Path("answers.jsonl"))] == ["a", "b", 3]
    options = {
        name
        for option in typer.main.get_command(app_with(["batch"])).commands["batch"].params  # type: ignore[attr-defined]
        for name in option.opts
    }
    for line in cluster.splitlines():
        assert {word for word in shlex.split(line) if word.startswith("--")} <= options
    assert _exit_code(["batch", "--help"]) == 0
    assert "unspool batch prompts.jsonl answers.jsonl" in capsys.readouterr().out


# -- Batches in OpenAI's format: requests in, lines of its output file out ------------------------


CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "What is a page?"}]


def request(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES, **body} if url == CHAT else body
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def test_requests_are_answered_as_the_server_does(tmp_path: Path, chatty: Path):
    rows = write_rows(
        tmp_path / "in.jsonl",
        [
            request("plain", model="gpt-4o-mini"),
            request("own", max_completion_tokens=3, temperature=0, seed=9),
            request("text", "/v1/completions", prompt="A node", n=2, max_tokens=5),
            request("answer", "/v1/responses", input="What is a page?", max_output_tokens=16),
            request("vector", "/v1/embeddings", input="A node"),
        ],
    )
    output = tmp_path / "out.jsonl"
    assert batch(chatty, rows, output, "--any-model") == 0
    lines = {line["custom_id"]: line for line in read_lines(output)}
    assert list(lines) == ["plain", "own", "text", "answer", "vector"]
    for line in lines.values():
        assert line["error"] is None and line["id"].startswith("batch_req_")
        assert line["response"]["status_code"] == 200
        assert line["response"]["request_id"].startswith("req_")
    bodies = {name: line["response"]["body"] for name, line in lines.items()}
    assert bodies["plain"]["model"] == chatty.name
    lm = unspool.load(chatty)
    seed = row_seed(7, json.dumps("plain"))
    expected = lm.chat(MESSAGES, seed=seed, max_tokens=12)
    assert bodies["plain"]["choices"][0]["message"]["content"] == expected.text
    assert bodies["plain"]["usage"]["completion_tokens"] == len(expected.tokens)
    expected = lm.chat(MESSAGES, seed=9, max_tokens=3, temperature=0)
    assert bodies["own"]["choices"][0]["message"]["content"] == expected.text
    seed = row_seed(7, json.dumps("text"))
    for number, choice in enumerate(bodies["text"]["choices"]):
        alone = lm.generate("A node", seed=seed, sample=number, max_tokens=5)
        assert choice["text"] == alone.text
    assert bodies["answer"]["object"] == "response"
    assert len(bodies["vector"]["data"][0]["embedding"]) == lm.config.width
    lm.close()


def test_requests_that_cannot_be_answered(
    tmp_path: Path, chatty: Path, capsys: pytest.CaptureFixture[str]
):
    wrong = "invalid_request_error"
    bad = [
        (request("model", model="gpt-4o-mini"), "model_not_found"),
        (request("hot", temperature=-3), wrong),
        (request("typo", temprature=1), "unknown_parameter"),
        (request("long", "/v1/completions", prompt="a " * 2000), "context_length_exceeded"),
        ({**request("url"), "url": "/v1/images"}, wrong),
        ({**request("method"), "method": "GET"}, wrong),
        ({**request("body"), "body": None}, wrong),
        (request("stream", stream=True), wrong),
    ]
    inputs = [*(row for row, _ in bad), request("good"), request("good")]
    rows = write_rows(tmp_path / "in.jsonl", [*inputs, {**request("x"), "custom_id": None}, 7])
    output = tmp_path / "out.jsonl"
    assert batch(chatty, rows, output) == 1
    assert [line["custom_id"] for line in read_lines(output)] == ["good"]
    failed = read_lines(tmp_path / "out.errors.jsonl")
    for (row, code), line in zip(bad, failed, strict=False):
        response = line["response"]
        assert line["custom_id"] == row["custom_id"] and line["error"]["code"] == code, line
        assert response["status_code"] == (404 if code == "model_not_found" else 400), line
        assert response["body"]["error"]["message"] in line["error"]["message"]
    assert [line["custom_id"] for line in failed[len(bad) :]] == ["good", None, None]
    for line in failed[-3:]:
        assert line["response"] is None and line["error"]["code"] == "invalid_row"
    assert "--any-model" in capsys.readouterr().err
