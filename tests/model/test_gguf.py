"""The GGUF reader: every type it claims, against the gguf package; and files made to break it."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.tiny_gguf import write_tiny
from unspool.errors import ModelFileError
from unspool.model.files.checkpoint import open_checkpoint
from unspool.model.files.gguf import BLOCK_TYPES, GGUFFile


def write_gguf(path: Path, tensors: dict[str, tuple[np.ndarray, int]], **metadata: object) -> Path:
    """A small GGUF file, written by the gguf package."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        name = key.replace("__", ".")
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, int(value))  # type: ignore[call-overload]
    for name, (data, number) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(number))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(number: int, rows: int, columns: int) -> np.ndarray:
    """Random packed rows of a type, without scales that are infinite or not a number."""
    kind = BLOCK_TYPES[number]
    values = np.random.default_rng(number).standard_normal((rows, columns)).astype(np.float32)
    if kind.name == "F32":
        return values
    if kind.name == "F16":
        return values.astype(np.float16)
    try:
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType(number))
    except NotImplementedError:  # the K types cannot be written in Python: take random bits
        bits = np.random.default_rng(number)
        shape = (rows, columns // kind.elements * kind.size)
        # 0x3F as the high byte of a half is no NaN and no infinity, wherever the scales lie.
        return bits.integers(0, 0x3F, shape, dtype=np.uint8)


# All but Q1_0, which the package knows by its name only.
@pytest.mark.parametrize(
    "number", [n for n in BLOCK_TYPES if n != 41], ids=lambda n: BLOCK_TYPES[n].name
)
def test_every_type_reads_as_the_gguf_package_reads_it(number: int, tmp_path: Path):
    blocks = random_blocks(number, rows=3, columns=512)
    path = write_gguf(tmp_path / "a.gguf", {"first": (blocks, number), "second": (blocks, number)})
    file = GGUFFile(path)
    reader = gguf.GGUFReader(path)
    for reference in reader.tensors:
        expected = gguf.quants.dequantize(reference.data, reference.tensor_type)
        model = file.float32(reference.name)
        assert model.shape == (3, 512)
        assert model.dtype == np.float32
        np.testing.assert_array_equal(model, expected)
        assert np.isfinite(model).all() and model.std() > 0


def test_one_bit_a_number_by_hand(tmp_path: Path):
    bits = np.random.default_rng(0).integers(0, 2, 128, dtype=np.uint8)
    scale = np.array([np.float16(0.25)]).view(np.uint8)
    block = np.concatenate([scale, np.packbits(bits, bitorder="little")])
    path = write_gguf(tmp_path / "a.gguf", {"x": (block[None], 41)})
    expected = np.where(bits, np.float32(0.25), np.float32(-0.25))
    np.testing.assert_array_equal(GGUFFile(path).float32("x")[0], expected)


def test_nvfp4_with_a_factor_for_each_tensor_or_expert(tmp_path: Path):
    blocks = random_blocks(40, rows=6, columns=128)
    factors = np.array([0.5, 3.0], np.float32)
    tensors = {
        "a.weight": (blocks, 40), "a.scale": (factors[:1], 0),
        "b_exps.weight": (blocks.reshape(2, 3, -1), 40), "b_exps.scale": (factors, 0),
    }  # fmt: skip
    file = GGUFFile(write_gguf(tmp_path / "a.gguf", tensors))
    plain = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.NVFP4)
    np.testing.assert_array_equal(file.float32("a.weight"), plain * np.float32(0.5))
    item = plain.reshape(2, 3, 128) * factors[:, None, None]
    np.testing.assert_array_equal(file.float32("b_exps.weight"), item)
    for number, part in enumerate(file.stored("b_exps.weight").slices()):
        np.testing.assert_array_equal(part.float32(), item[number])


def test_quantization_by_hand(tmp_path: Path):
    """Q4_0 and Q8_0 from their definition, so that not only gguf vouches for gguf."""
    scale, nibbles = np.float16(0.5), np.arange(16, dtype=np.uint8)
    block = np.concatenate([np.array([scale]).view(np.uint8), nibbles | (nibbles[::-1] << 4)])
    path = write_gguf(tmp_path / "a.gguf", {"x": (block[None], 2)})
    expected = np.concatenate([nibbles, nibbles[::-1]]).astype(np.float32) - 8
    np.testing.assert_array_equal(GGUFFile(path).float32("x")[0], expected * 0.5)
    complete = np.arange(-16, 16, dtype=np.int8)
    block = np.concatenate([np.array([scale]).view(np.uint8), complete.view(np.uint8)])
    path = write_gguf(tmp_path / "b.gguf", {"x": (block[None], 8)})
    np.testing.assert_array_equal(GGUFFile(path).float32("x")[0], complete * np.float32(0.5))


def test_metadata_of_every_kind(tmp_path: Path):
    path = write_gguf(
        tmp_path / "a.gguf",
        {},
        a__text="Grüße 🌿",
        a__number=7,
        a__float=0.5,
        a__texts=["one", "", "drei"],
        a__numbers=[1, 2, 3],
    )
    result = GGUFFile(path).metadata
    assert result["a.text"] == "Grüße 🌿"
    assert (result["a.number"], result["a.float"]) == (7, 0.5)
    assert result["a.texts"] == ["one", "", "drei"]
    assert result["a.numbers"].tolist() == [1, 2, 3]


def test_unsupported_type_is_named(tmp_path: Path):
    block = np.zeros((1, 292), np.uint8)  # one block of 256 numbers
    path = write_gguf(tmp_path / "a.gguf", {"blk.0.attn_q.weight": (block, 15)})
    with pytest.raises(ModelFileError, match=r"blk\.0\.attn_q\.weight has type Q8_K"):
        GGUFFile(path).float32("blk.0.attn_q.weight")


@pytest.mark.parametrize(
    ("surplus", "numbers", "words"),
    [
        ({"blk.1.attn_q.weight": (32, 32)}, {}, r"1 layers, and the file has more: blk\.1\.attn_q"),
        ({"blk.0.attn_q_norm.weight": (32,)}, {}, r"does not use: blk\.0\.attn_q_norm"),
        ({}, {"block_count": 3}, r"lacks blk\.1\.attn_norm\.weight, .* and 14 more"),
    ],
)
def test_tensors_and_settings_belong_together(
    tmp_path: Path, surplus: dict[str, tuple[int, ...]], numbers: dict[str, int], words: str
):
    path = write_tiny(tmp_path / "a.gguf", surplus=surplus, numbers=numbers)
    with pytest.raises(ModelFileError, match=words) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_mtp_layers_and_rotary_factors_are_no_part_of_the_model(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
):
    surplus = {"blk.1.attn_q.weight": (32, 32), "blk.1.nextn.eh_proj.weight": (32, 64),
               "rope_freqs.weight": (4,)}  # fmt: skip
    numbers = {"block_count": 2, "nextn_predict_layers": 1}
    path = write_tiny(tmp_path / "a.gguf", surplus=surplus, numbers=numbers)
    assert open_checkpoint(path).config.layers == 1 and not recwarn.list


@pytest.fixture(params=["native", "python"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read arrays of strings with the native library and without it."""
    if request.param == "python":
        monkeypatch.setattr("unspool.native.missing_reason", lambda: "not built")


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("texts", [["", "a", "Ġthe", "東京"], ["a\0b", "\0", ""], [""]])
def test_arrays_of_strings(texts: list[str], tmp_path: Path):
    path = write_gguf(tmp_path / "a.gguf", {}, a__texts=texts, b__number=7)
    metadata = GGUFFile(path).metadata
    assert (metadata["a.texts"], metadata["b.number"]) == (texts, 7)


HEADER = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)
STRINGS = HEADER[:16] + struct.pack("<QQ", 1, 1) + b"k" + struct.pack("<II", 9, 8)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"GGU", "begins with"),
        (b"PK\x03\x04" * 10, "begins with"),
        (b"GGUF\x03\x00\x00\x00", "ends in the middle"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version is 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "metadata entries, more than"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "tensors, more than"),
        (HEADER[:16] + struct.pack("<QQ", 1, 2**62) + b"key" * 9, "characters of text, more than"),
        # one key, an array of 2**40 numbers
        (
            HEADER[:16] + struct.pack("<QQ", 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**40),
            "numbers in an array, more than",
        ),
        # one key, an array of strings: too many, too long, cut off, not UTF-8
        (STRINGS + struct.pack("<Q", 2**40), "texts in an array, more than"),
        (STRINGS + struct.pack("<QQ", 1, 2**62), "longer than the file"),
        (STRINGS + struct.pack("<QQ", 1, 2**64 - 1), "longer than the file"),
        (STRINGS + struct.pack("<QQ", 2, 4) + b"text" + b"\0" * 7, "ends in the middle"),
        (STRINGS + struct.pack("<QQ", 1, 2) + b"a\xff", "not UTF-8"),
        # one key of an unknown type
        (HEADER[:16] + struct.pack("<QQ", 1, 1) + b"k" + struct.pack("<IQ", 99, 0), "type 99"),
        # a tensor far outside
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"t"
            + struct.pack("<IQIQ", 1, 32, 0, 2**40) + b"\0" * 64,
            "reaches past its end",
        ),
        # a tensor of 2**63 numbers
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"t"
            + struct.pack("<IQIQ", 1, 2**63, 0, 0) + b"\0" * 64,
            "reaches past its end",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"t"
            + struct.pack("<IQIQ", 1, 0, 0, 0) + b"\0" * 64,
            "axis of size 0",
        ),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("reader")
def test_broken_files_end_in_a_sentence(content: bytes, words: str, tmp_path: Path):
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=words) as caught:
        GGUFFile(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    blocks = random_blocks(3, rows=2, columns=64)
    return write_gguf(
        tmp_path_factory.mktemp("fuzz") / "whole.gguf",
        {"token_embd.weight": (blocks, 3), "x": (random_blocks(0, 1, 8), 0)},
        llama__block_count=1,
        tokenizer__tokens=["a", "b", "c"],
        tokenizer__scores=[1.0, 2.0],
    )


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_fuzzed_files_never_crash_or_grow(data: st.DataObject, small_file: Path):
    """Cut, flip and overwrite: a sentence or a readable file, and no large allocation."""
    content = bytearray(small_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 8))
        if data.draw(st.booleans()):
            content[at] = data.draw(st.integers(0, 255))
        else:  # a whole number: where a count or an offset may stand
            value = data.draw(st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
            content[at : at + 8] = struct.pack("<Q", value)
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    path = small_file.with_name("broken.gguf")
    path.write_bytes(content)
    tracemalloc.start()
    try:
        file = GGUFFile(path)
        for name in file.tensors:
            file.float32(name)
        open_checkpoint(path)
    except ModelFileError as error:
        assert "\n" not in str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 50_000_000


def test_a_model_in_several_files(tmp_path: Path):
    complete = GGUFFile(write_tiny(tmp_path / "whole.gguf"))
    write_tiny(tmp_path / "split" / "m.gguf", parts=3)
    parts = sorted((tmp_path / "split").iterdir())
    assert [part.name for part in parts] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for path in (*parts, tmp_path / "split"):  # by any of its parts, or by its folder
        file = open_checkpoint(path).file  # type: ignore[attr-defined]
        assert file.tensors.keys() == complete.tensors.keys()
        for name in complete.tensors:
            assert (file.float32(name) == complete.float32(name)).all()
    parts[1].unlink()
    for path in (parts[0], parts[2]):
        with pytest.raises(ModelFileError, match=r"m-00002-of-00003\.gguf is missing"):
            open_checkpoint(path)
