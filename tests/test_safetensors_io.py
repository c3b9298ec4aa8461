# SPDX-License-Identifier: MIT
"""Headers of safetensors files: strict reading, and plans that the library reads."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from k3session.errors import CheckpointError, SnapshotCorruptError
from k3session.safetensors_io import HEADER_LIMIT, plan, read_header


def assemble(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = {"__metadata__": {"format": "pt"}, "a": entry("F32", [2, 3], 0, 24), "b": entry("BF16", [5], 24, 34)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "one.safetensors"
    made.write_bytes(assemble(GOOD, bytes(34)))
    return made


def refusal(file: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read_header(file)
    assert str(error.value).startswith("one.safetensors: ")
    return str(error.value)


def test_a_good_file(file: Path) -> None:
    header = read_header(file)
    assert list(header.tensors) == ["a", "b"]
    assert header.tensors["b"].dtype == "BF16" and header.tensors["b"].shape == (5,)
    assert (header.tensors["b"].begin, header.tensors["b"].end, header.tensors["b"].nbytes) == (24, 34, 10)
    assert header.metadata == {"format": "pt"}
    assert header.data_start + 34 == header.file_size == file.stat().st_size


def test_a_file_of_the_library_itself(tmp_path: Path) -> None:
    made = tmp_path / "one.safetensors"
    safetensors.numpy.save_file({"x": np.arange(6, dtype=np.float32).reshape(2, 3)}, made)
    assert read_header(made).tensors["x"].shape == (2, 3)


def test_every_truncation_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        message = refusal(file)
        assert "truncated" in message, (size, message)


def test_a_truncation_names_both_sizes(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    message = refusal(file)
    assert f"declares {len(whole)} bytes" in message and f"has {len(whole) - 3}" in message


def test_bytes_at_the_end_are_refused(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"xy")
    assert "2 bytes at the end belong to no tensor" in refusal(file)


BAD: dict[str, tuple[Any, str]] = {
    "overlap": (GOOD | {"b": entry("BF16", [5], 20, 30)}, "'b' overlaps the tensor before it"),
    "gap": ({"a": GOOD["a"], "b": entry("BF16", [4], 26, 34)}, "'b' leaves a gap before it"),
    "hole at the start": ({"a": entry("F32", [2, 3], 10, 34)}, "'a' leaves a gap"),
    "size": (GOOD | {"b": entry("BF16", [4], 24, 34)}, "takes 8 bytes"),
    "backwards": (GOOD | {"b": entry("BF16", [5], 34, 24)}, "span -10"),
    "negative offset": (GOOD | {"a": entry("F32", [2, 3], -24, 0)}, "data_offsets is [-24, 0]"),
    "negative shape": (GOOD | {"a": entry("F32", [-2, -3], 0, 24)}, "shape is [-2, -3]"),
    "bool shape": (GOOD | {"a": entry("F32", [True, 6], 0, 24)}, "shape is [True, 6]"),
    "float shape": (GOOD | {"a": entry("F32", [2.0, 3], 0, 24)}, "shape is [2.0, 3]"),
    "huge shape": (GOOD | {"a": entry("F32", [2**70], 0, 24)}, "expected a list of sizes"),
    "product past 64 bits": (GOOD | {"a": entry("F32", [2**62, 2**62], 0, 24)}, "takes "),
    "1 TB claimed": ({"a": entry("U8", [2**40], 0, 2**40)}, "truncated by"),
    "dtype": (GOOD | {"a": entry("Q4", [2, 3], 0, 24)}, "dtype is 'Q4'"),
    "no dtype": (GOOD | {"a": {"shape": [2], "data_offsets": [0, 24]}}, "dtype is null"),
    "dtype type": (GOOD | {"a": entry(["F32"], [2, 3], 0, 24)}, "dtype is ['F32']"),
    "offsets": (GOOD | {"a": {"dtype": "F32", "shape": [6], "data_offsets": [0]}}, "data_offsets is [0]"),
    "entry type": (GOOD | {"a": 5}, "the entry is 5"),
    "dimensions": (GOOD | {"a": entry("F32", [1] * 40 + [6], 0, 24)}, "expected a list of sizes"),
    "metadata": (GOOD | {"__metadata__": {"a": 1}}, "__metadata__ is not an object of strings"),
    "metadata type": (GOOD | {"__metadata__": []}, "__metadata__ is not an object"),
    "not an object": (b"[1]", "the header starts with b'[1]'"),
    "empty header": (b"", "the header starts with b''"),
    "pickle": (b"\x80\x04\x95 a pickle", "the header starts with"),
    "not utf-8": (b'{"\xff": 1}', "not usable JSON"),
    "broken json": (b'{"a": ', "not usable JSON"),
    "nested": (b'{"a": ' + b"[" * 200_000, "nested too deeply"),
    "key twice": (
        b'{"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}, "a": 5}',
        "the key 'a' stands twice",
    ),
    "name twice": (
        (
            b'{"a": {"dtype": "U8", "shape": [34], "data_offsets": [0, 34]},'
            b' "a": {"dtype": "U8", "shape": [34], "data_offsets": [0, 34]}}'
        ),
        "the key 'a' stands twice",
    ),
    "name twice, spelt otherwise": (
        (
            b'{"a": {"dtype": "U8", "shape": [34], "data_offsets": [0, 34]},'
            b' "\\u0061": {"dtype": "U8", "shape": [34], "data_offsets": [0, 34]}}'
        ),
        "the key 'a' stands twice",
    ),
    "field twice, spelt otherwise": (
        b'{"a": {"dtype": "U8", "d\\u0074ype": "I8", "shape": [34], "data_offsets": [0, 34]}}',
        "the key 'dtype' stands twice",
    ),
    "metadata twice": (
        b'{"__metadata__": {}, "__metadata__": {}, "a": {"dtype": "U8", "shape": [34], "data_offsets": [0, 34]}}',
        "the key '__metadata__' stands twice",
    ),
    "metadata twice, spelt otherwise": (
        b'{"__metadata__": {}, "__m\\u0065tadata__": {}, "a": {"dtype": "U8", "shape": [34], "data_offsets": [0, 34]}}',
        "the key '__metadata__' stands twice",
    ),
    "metadata with a key twice": (
        b'{"__metadata__": {"k": "1", "k": "1"}, "a": {"dtype": "U8", "shape": [34], "data_offsets": [0, 34]}}',
        "the key 'k' stands twice",
    ),
    "field twice": (
        b'{"a": {"dtype": "U8", "dtype": "I8", "shape": [34], "data_offsets": [0, 34]}}',
        "the key 'dtype' stands twice",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_header_that_lies_is_refused(file: Path, case: str) -> None:
    header, expected = BAD[case]
    file.write_bytes(assemble(header, bytes(34)))
    assert expected in refusal(file)


def test_a_header_length_is_bounded_before_anything_is_read(file: Path) -> None:
    file.write_bytes(struct.pack("<Q", HEADER_LIMIT + 1) + b"{}")
    assert f"expected at most {HEADER_LIMIT}" in refusal(file)
    file.write_bytes(struct.pack("<Q", 2**64 - 1) + b"{}")
    assert "claims 18446744073709551615 bytes" in refusal(file)


def test_a_git_lfs_pointer_is_recognised(file: Path) -> None:
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n")
    assert "Git LFS pointer" in refusal(file)


@pytest.mark.parametrize("make", [lambda f: None, lambda f: f.mkdir()], ids=["missing", "folder"])
def test_a_file_that_cannot_be_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    file = tmp_path / "one.safetensors"
    make(file)
    assert "cannot be read" in refusal(file)


def test_the_error_class_is_the_callers(file: Path) -> None:
    file.write_bytes(b"")
    with pytest.raises(SnapshotCorruptError, match="truncated"):
        read_header(file, SnapshotCorruptError)


def test_the_library_has_the_last_word(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise safetensors.SafetensorError("something else")

    monkeypatch.setattr(safetensors, "safe_open", refuse)
    assert "the safetensors library refuses the file: something else" in refusal(file)


def test_a_plan_is_a_file_that_the_library_reads(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "grüße": np.arange(6, dtype=np.float32).reshape(2, 3),
        "u": np.arange(5, dtype=np.uint8),
    }
    kinds = {"grüße": "F32", "u": "U8"}
    laid_out = plan(((n, kinds[n], a.shape) for n, a in values.items()), {"who": "me"})
    file = tmp_path / "one.safetensors"
    with open(file, "wb") as out:
        out.write(laid_out.header)
        for name, array in values.items():
            assert out.tell() == laid_out.offsets[name]
            out.write(array.tobytes())
        assert out.tell() == laid_out.total
    assert len(laid_out.header) % 8 == 0
    assert read_header(file).metadata == {"who": "me"}
    loaded = safetensors.numpy.load_file(file)
    assert all(np.array_equal(loaded[n], a) for n, a in values.items())


def test_a_plan_with_nothing_in_it(tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    laid_out = plan([])
    file.write_bytes(laid_out.header)
    assert read_header(file).tensors == {} and laid_out.total == len(laid_out.header)


def test_a_plan_refuses_a_name_twice() -> None:
    with pytest.raises(ValueError, match="planned twice"):
        plan([("a", "U8", (1,)), ("a", "U8", (1,))])
