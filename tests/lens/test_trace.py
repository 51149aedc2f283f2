"""A generation in a file, and files that only pretend to be one."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
from pathlib import Path

import pytest

from unspool.engine.request import Limits
from unspool.engine.results import Step
from unspool.errors import UnspoolError
from unspool.lens import trace as module
from unspool.lens.trace import Trace, load_trace, save_trace, trace_from, trace_of
from unspool.sampling import Draw, GrammarSpec, SamplingSettings, StageReport
from unspool.sampling.guards import GuardPolicy
from unspool.sampling.monitors import BannedGuard, LoopGuard, SurpriseGuard

PROMPT = [1, 40, 77]


@pytest.fixture(scope="module")
def saved_trace(tiny_lm) -> Trace:
    generation = tiny_lm.generate(
        PROMPT, max_tokens=8, seed=2**70 + 1, top=4, explain=True, temperature=1.3,
        stop=["é", "\n\n"],
        logit_bias={5: -math.inf, 6: 1 / 3}, dry_multiplier=0.7, dry_breakers=((3,), (4, 5)),
        stages=("temperature", "top_k", "top_p", "min_p", "dry", "logit_bias"),
    )  # fmt: skip
    guards = GuardPolicy((LoopGuard(), BannedGuard(("foo",), ("b+ar",)), SurpriseGuard(mean=9.5)))
    trace = trace_of(tiny_lm, generation)
    return dataclasses.replace(
        trace, guards=guards, guarded=True, grammar=GrammarSpec.choice(["é", "no"])
    )


def refused(data: object) -> str:
    """A one-line error for any fault, loaded through JSON text."""
    with pytest.raises(UnspoolError) as error:
        trace_from(json.loads(json.dumps(data)))
    message = str(error.value)
    assert "\n" not in message and len(message) < 400
    return message


def test_round_trip_is_exact(saved_trace, tmp_path):
    save_trace(saved_trace, tmp_path / "t.json")
    json.loads((tmp_path / "t.json").read_text(), parse_constant=pytest.fail)  # no NaN, no inf
    back = load_trace(tmp_path / "t.json")
    assert back == saved_trace
    assert back.to_dict() == saved_trace.to_dict()
    assert back.settings.logit_bias == {5: -math.inf, 6: 1 / 3}
    assert back.steps[0].stages and back.steps[0].candidates and back.steps[0].draw
    assert [type(step) for step in back.steps] == [Step] * 8


def test_a_file_that_was_saved_before_is_still_read():
    file = Path(__file__).with_name("trace_version_1.json")
    trace = load_trace(file)
    older = json.loads(file.read_text())
    older["limits"]["endless"] = None  # which came later, as did these
    older |= {"thoughts": "", "think_budget": None, "interventions": []}
    assert trace.to_dict() == older
    first, last = trace.steps
    assert first.chosen and first.bytes == b"\xff\x00" and first.logprob == -math.inf
    assert isinstance(last, Step) and isinstance(last.draw, Draw)
    assert last.candidates and all(isinstance(stage, StageReport) for stage in last.stages)
    assert trace.settings.seed == 2**70 + 1 and trace.settings.dry_breakers == ((3,), (4, 5))
    assert trace.settings.logit_bias == {5: -math.inf, 6: 1 / 3}
    assert trace.limits.stop == ("é",) and trace.grammar == GrammarSpec.choice(["é", "no"])
    guards = (LoopGuard(), BannedGuard(("foo",), ("b+ar",)), SurpriseGuard(mean=9.5))
    assert trace.guards == GuardPolicy(guards) and trace.guarded


def test_every_field_is_saved_and_read(saved_trace):
    """A new field of a step must be added to the trace."""
    data = saved_trace.to_dict()
    assert data["steps"][0].keys() == {f.name for f in dataclasses.fields(Step) if f.compare}
    assert data["limits"].keys() == {f.name for f in dataclasses.fields(Limits) if f.compare}
    assert data["settings"].keys() == {f.name for f in dataclasses.fields(SamplingSettings)}
    assert data["steps"][0]["draw"].keys() == {f.name for f in dataclasses.fields(Draw)}
    stage = data["steps"][0]["stages"][0]
    assert stage.keys() == {f.name for f in dataclasses.fields(StageReport)}
    for guard_json in data["guards"]["guards"]:
        made_by = {"loop": LoopGuard, "ban": BannedGuard, "surprise": SurpriseGuard}[
            guard_json["kind"]
        ]
        assert guard_json.keys() == {f.name for f in dataclasses.fields(made_by) if f.init} | {
            "kind"
        }
    for path in _paths(data):
        if path[0] in ("text",) or "config" in path:
            continue  # for people; compared as a whole
        if path in (("limits", "endless"), ("thoughts",), ("think_budget",), ("interventions",)):
            continue  # older files lack it
        broken = copy.deepcopy(data)
        _parent(broken, path).pop(path[-1])
        refused(broken)


def _paths(data, before=()):
    for name, value in data.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from _paths(value, (*before, name))
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield from _paths(value[0], (*before, name, 0))


def _parent(data, path):
    for name in path[:-1]:
        data = data[name]
    return data


HOSTILE = [None, True, -1, 1.5, 10**400, "", "\ud800", [], {}, [[1, 2, 3]]]


def test_wrong_values_are_one_line_or_harmless(saved_trace):
    data = saved_trace.to_dict()
    del data["steps"][1:], data["steps"][0]["candidates"][1:], data["steps"][0]["stages"][1:]
    for path in _paths(data):
        for value in HOSTILE:
            parent, key = _parent(data, path), path[-1]
            valid, parent[key] = parent[key], value
            text = json.dumps(data)
            parent[key] = valid
            try:
                trace_from(json.loads(text))
            except UnspoolError as error:
                assert "\n" not in str(error) and len(str(error)) < 600


def test_what_is_wrong_is_said(saved_trace):
    data = saved_trace.to_dict()
    assert "not an Unspool trace" in refused({})
    assert "not an Unspool trace" in refused({**data, "format": "other"})
    for version in (2, 0, "1", None, True, 10**50):
        assert "version" in refused({**data, "version": version})
    assert "object" in refused([1])
    assert "steps[2].token" in refused(_changed(data, "steps", 2, "token", value="x"))
    assert "steps[0].logprob" in refused(_changed(data, "steps", 0, "logprob", value=[]))
    assert "steps[1].position" in refused(_changed(data, "steps", 1, "position", value=9))
    assert "probability" in refused(_changed(data, "steps", 1, "probability", value=0))
    assert "given" in refused({**data, "given": 9})
    assert "empty" in refused({**data, "prompt": [], "steps": []})
    assert "temperature" in refused(_changed(data, "settings", "temperature", value=-1))
    assert "stage" in refused(_changed(data, "settings", "stages", value=["nonsense"]))
    assert "surrogate" in refused(_changed(data, "steps", 0, "text", value="\ud800"))
    assert "grammar" in refused({**data, "grammar": {"kind": "x", "source": ""}})


def _changed(data, *path, value):
    changed = copy.deepcopy(data)
    _parent(changed, path)[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"null", b"[]", b"\xff\xfe", b"NaN", b'{"format": NaN}', b"1" * 10_000,
        b"[" * 200_000, b'{"a":' * 100_000, b'"unspool-trace"', b"\x00" * 50, b"\x89PNG\r\n",
        b'{"format":"unspool-trace","version":1}', b'{"format":"unspool-trace"}',
    ],
)  # fmt: skip
def test_broken_files(content, tmp_path):
    file = tmp_path / "t.json"
    file.write_bytes(content)
    with pytest.raises(UnspoolError) as error:
        load_trace(file)
    assert str(error.value).startswith(str(file)) and "\n" not in str(error.value)


def test_damaged_files(saved_trace, tmp_path):
    """Bytes changed, cut out and doubled at random: a trace or one line, never anything else."""
    file = tmp_path / "t.json"
    save_trace(saved_trace, file)
    good = file.read_bytes()
    chance = random.Random(1)
    for _ in range(150):
        data = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(data))
            data[at : at + chance.randint(0, 3)] = chance.choice(
                [b"", b"9", b"-", b"e9", b"null", b'"', b"]", b"\xf0", b"999999999999999999999"]
            )
        file.write_bytes(bytes(data))
        try:
            load_trace(file)
        except UnspoolError as error:
            assert "\n" not in str(error)


def test_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MAX_FILE_BYTES", 100)
    (tmp_path / "t.json").write_text(" " * 101)
    with pytest.raises(UnspoolError, match="MB"):
        load_trace(tmp_path / "t.json")


def test_writing_is_whole_or_not_at_all(saved_trace, tmp_path, monkeypatch):
    file = tmp_path / "t.json"
    file.write_text("before")
    monkeypatch.setattr(
        module.Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError(28, "full"))
    )
    with pytest.raises(UnspoolError, match=r"cannot be written"):
        save_trace(saved_trace, file)
    assert file.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_places_that_cannot_be_written_or_read(saved_trace, tmp_path):
    for place in (tmp_path / "no" / "t.json", "/proc/t.json"):
        with pytest.raises(UnspoolError, match="cannot be written"):
            save_trace(saved_trace, place)
    for place in (tmp_path, "/dev/null"):
        with pytest.raises(UnspoolError, match="not a regular file"):
            save_trace(saved_trace, place)
    for place in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(UnspoolError, match="cannot be read"):
            load_trace(place)


def test_a_link_stays_a_link(saved_trace, tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    save_trace(saved_trace, tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert load_trace(tmp_path / "real.json") == saved_trace


def test_which_steps_were_given(tiny_lm):
    draft = tiny_lm.generate(PROMPT, max_tokens=6, seed=1)
    assert trace_of(tiny_lm, draft).given == 0
    assert trace_of(tiny_lm, draft.rewind(3)).given == 0
    edited = draft.rewind(3).choose(7)
    assert trace_of(tiny_lm, edited).given == 4
    resumed = edited.resume()
    assert trace_of(tiny_lm, resumed).given == 4
    assert trace_of(tiny_lm, resumed.rewind(2)).given == 2
