"""The safetensors reader: the package's own files, and files made to break it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from unspool.errors import ModelFileError
from unspool.model.files.safetensors import SafetensorsFile


def test_what_the_package_writes(tmp_path: Path):
    torch.manual_seed(0)
    wide = torch.randn(5, 7, 3)
    tensors = {
        "f32": wide,
        "f16": wide.half(),
        "bf16": wide.bfloat16(),
        "f64": wide.double(),
        "one": torch.tensor(2.5),
        "none": torch.zeros(0, 4),
        "mask": torch.ones(3, dtype=torch.bool),
    }
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert set(file.tensors) == set(tensors)
    kinds = {"f32": "F32", "f16": "F16", "bf16": "BF16", "f64": "F32", "one": "F32", "none": "F32"}
    for name, kind in kinds.items():
        result = file.stored(name)
        assert (result.type, result.shape) == (kind, tuple(tensors[name].shape))
        np.testing.assert_array_equal(result.float32(), tensors[name].float().numpy())
    assert not file.stored("bf16").data.flags.writeable, "a view into the file"
    with pytest.raises(ModelFileError, match="mask holds bool numbers"):
        file.stored("mask")


def written(path: Path, header: Any, data: bytes = bytes(16), length: int | None = None) -> Path:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content) if length is None else length) + content + data)
    return path


def entry(**changes: Any) -> dict[str, Any]:
    result = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}
    return {"x": {name: value for name, value in result.items() if value != "gone"}}


def test_the_smallest_file(tmp_path: Path):
    numbers = np.arange(4, dtype="<f4")
    file = SafetensorsFile(written(tmp_path / "a", entry(), numbers.tobytes()))
    np.testing.assert_array_equal(file.stored("x").float32(), numbers.reshape(2, 2))
    # A header may end anywhere: numbers need not lie where a processor likes them.
    odd = written(tmp_path / "b", json.dumps(entry()).encode() + b" " * 3, numbers.tobytes())
    np.testing.assert_array_equal(SafetensorsFile(odd).stored("x").float32().ravel(), numbers)


@pytest.mark.parametrize(
    ("header", "length", "words"),
    [
        (b"", 2**63, "claims a header of 9,223,372,036,854,775,808 bytes"),
        (b"{}", 200, "claims a header of 200 bytes"),
        (b"{", None, "not JSON"),
        (b"\xff\xfe", None, "not JSON"),
        (b"[" * 100_000, None, "not JSON"),
        (b'{"x": ' + b"9" * 5000 + b"}", None, "not JSON"),
        ([1], None, "not a JSON object"),
        ({"x": 7}, None, "'x' has no description"),
        (entry(dtype="Q4"), None, "unknown type 'Q4'"),
        (entry(dtype=["F32"]), None, "unknown type"),
        (entry(dtype="gone"), None, "unknown type 'None'"),
        (entry(shape="gone"), None, "invalid shape None"),
        (entry(shape=[2, -2]), None, r"invalid shape \[2, -2\]"),
        (entry(shape=[2, 2.0]), None, "invalid shape"),
        (entry(shape=[True, 4]), None, "invalid shape"),
        (entry(shape=[2**62, 4]), None, "invalid shape"),
        (entry(shape=[2**61, 2**61, 2**61]), None, "does not match its shape"),
        (entry(shape=[1] * 9), None, "invalid shape"),
        (entry(shape=[2, 3]), None, "16 bytes, which does not match its shape"),
        (entry(dtype="F16"), None, "16 bytes, which does not match its shape"),
        (entry(data_offsets=[16, 0]), None, "invalid data_offsets"),
        (entry(data_offsets=[0]), None, "invalid data_offsets"),
        (entry(data_offsets=[-16, 0]), None, "invalid data_offsets"),
        (entry(data_offsets="gone"), None, "invalid data_offsets"),
        (entry(data_offsets="\n"), None, "invalid data_offsets"),
        (entry(shape="\n"), None, "invalid shape"),
        (entry(data_offsets=[8, 24]), None, "truncated"),
        (b'{"x": 1, "x": 2}', None, "duplicate name 'x'"),
    ],
)
def test_broken_headers_end_in_a_sentence(
    header: Any, length: int | None, words: str, tmp_path: Path
):
    path = written(tmp_path / "a.safetensors", header, length=length)
    with pytest.raises(ModelFileError, match=words) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert "download it again" in str(caught.value)


def test_files_without_a_header(tmp_path: Path):
    for content in (b"", b"1234567"):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(ModelFileError, match=r"not a usable safetensors file|is empty"):
            SafetensorsFile(tmp_path / "a")
    with pytest.raises(ModelFileError, match="cannot be read"):
        SafetensorsFile(tmp_path)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
_entry = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F64", "I8", "F4"]) | _json,
        "shape": st.lists(st.integers(-1, 2**64), max_size=3) | _json,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | _json,
    }
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(header=st.dictionaries(st.text(max_size=3), _entry | _json, max_size=3), data=st.binary())
def test_any_header_is_read_or_refused(header: dict[str, Any], data: bytes, tmp_path: Path):
    path = written(tmp_path / "a.safetensors", header, data)
    try:
        file = SafetensorsFile(path)
        for name, placed in file.tensors.items():
            assert file.stored(name).float32().shape == placed.shape
    except ModelFileError as error:
        assert "\n" not in str(error)
