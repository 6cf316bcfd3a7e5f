"""The container: what goes in comes out, and nothing else is believed."""

import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save

from etude.common.errors import CorruptError
from etude.common.weights.tensors.safetensors import ITEM_BYTES, Tensor, decode, encode

Rows = list[tuple[str, str, tuple[int, ...], bytes]]


def small_tensors(value: float) -> list[Tensor]:
    """Three formats, an odd size, and a tensor without elements."""
    return [
        Tensor(name="norm", dtype="BF16", shape=(3,), data=struct.pack("<3e", *[value] * 3)),
        Tensor(name="embed", dtype="F32", shape=(2, 3), data=struct.pack("<6f", *[value] * 6)),
        Tensor(name="mask", dtype="U8", shape=(5,), data=bytes([int(value) % 256] * 5)),
        Tensor(name="nothing", dtype="F32", shape=(0, 4), data=b""),
    ]


def rows(tensors: list[Tensor]) -> Rows:
    return sorted((t.name, t.dtype, t.shape, bytes(memoryview(t.data))) for t in tensors)


@st.composite
def any_tensor(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    size = ITEM_BYTES[dtype]
    for count in shape:
        size *= count
    name = draw(st.text(min_size=1, max_size=20).filter(lambda text: text != "__metadata__"))
    return Tensor(
        name=name, dtype=dtype, shape=shape, data=draw(st.binary(min_size=size, max_size=size))
    )


def by_name(tensor: Tensor) -> str:
    return tensor.name


@settings(max_examples=150)
@given(st.lists(any_tensor(), min_size=1, max_size=6, unique_by=by_name))
def test_any_tensors_survive_the_container(tensors: list[Tensor]) -> None:
    assert rows(decode(encode(tensors), where="here")) == rows(tensors)


def test_the_safetensors_package_reads_what_we_write(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(encode(small_tensors(2.0)))
    with safe_open(tmp_path / "x.safetensors", framework="numpy") as file:
        assert set(file.keys()) == {"norm", "embed", "mask", "nothing"}
        assert file.get_tensor("embed").tolist() == [[2.0] * 3] * 2


def test_we_read_what_the_safetensors_package_writes() -> None:
    data = save({"b": np.ones((2, 2), np.float32), "a": np.arange(3)}, metadata={"format": "pt"})
    found = {t.name: (t.dtype, t.shape) for t in decode(data, where="here")}
    assert found == {"a": ("I64", (3,)), "b": ("F32", (2, 2))}


def test_wide_formats_come_first_so_that_every_tensor_is_aligned() -> None:
    data = encode(small_tensors(1.0))
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    assert start % 8 == 0
    assert all(e["data_offsets"][0] % ITEM_BYTES[e["dtype"]] == 0 for e in header.values())


def test_a_container_cut_at_any_byte_is_refused() -> None:
    data = encode(small_tensors(1.0))
    for length in range(len(data)):
        with pytest.raises(CorruptError):
            decode(data[:length], where="here")


def test_no_flipped_bit_of_a_header_crashes_the_reader() -> None:
    # Without the digest that callers check first, a flip may go unseen; it must not do worse.
    data = bytearray(encode(small_tensors(1.0)))
    header_bits = 8 * (8 + int.from_bytes(data[:8], "little"))
    refused = 0
    for bit in random.Random(0).sample(range(header_bits), min(2_000, header_bits)):
        data[bit // 8] ^= 1 << bit % 8
        try:
            found = decode(bytes(data), where="here")
            assert sum(t.num_bytes for t in found) <= len(data)
        except CorruptError:
            refused += 1
        data[bit // 8] ^= 1 << bit % 8
    assert refused > header_bits // 2


def forged(header: object, payload: bytes = b"\0" * 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


def entry(begin: object, end: object, **other: object) -> dict[str, object]:
    return {"dtype": "U8", "shape": [8], "data_offsets": [begin, end]} | other


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ({"a": entry(0, 4, shape=[4])}, "belong to no tensor"),
        ({"a": entry(1, 8, shape=[7])}, "data begins at 1, not 0"),
        ({"a": entry(0, 5, shape=[5]), "b": entry(4, 8, shape=[4])}, "data begins at 4, not 5"),
        ({"a": entry(0, 3, shape=[3]), "b": entry(4, 8, shape=[4])}, "data begins at 4, not 3"),
        ({"a": entry(0, 9, shape=[9])}, "data ends outside the file"),
        ({"a": entry(0, 8, shape=[9])}, "takes 9 bytes, not 8"),
        ({"a": entry(0, 8, dtype="F32")}, "takes 32 bytes, not 8"),
        ({"a": entry(0, 8, dtype="E7")}, "unknown dtype"),
        ({"a": entry(0, 8, shape=[-8, -1])}, "no count"),
        ({"a": entry(0, 8, shape=[True, 8])}, "no count"),
        ({"a": entry(0, 8, shape=[8.0])}, "no count"),
        ({"a": entry(0, 8, shape=[1] * 9)}, "dimensions"),
        ({"a": entry(0, 8, shape=[2**60, 2**60, 0])}, "no count"),
        ({"a": entry(8, 0)}, "no description"),
        ({"a": entry(0, "8")}, "no description"),
        ({"a": entry(0, 8, extra=1)}, "no description"),
        ({"a": [0, 8]}, "no description"),
        ({"": entry(0, 8)}, "a name has"),
        ({"a" * 2000: entry(0, 8)}, "a name has"),
        ([], "no JSON object"),
        (b'{"a":1', "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"a":' + b"9" * 5_000 + b"}", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (
            b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},'
            b'"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
            "the same name twice",
        ),
    ],
)
def test_a_forged_header_is_refused_with_what_is_wrong(header: object, complaint: str) -> None:
    with pytest.raises(CorruptError, match=complaint):
        decode(forged(header), where="here")


def test_a_header_larger_than_the_file_is_refused_before_it_is_read() -> None:
    with pytest.raises(CorruptError, match="the header claims"):
        decode((1 << 62).to_bytes(8, "little") + b"{}", where="here")


def test_a_tensor_whose_data_does_not_match_its_shape_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="takes 8 bytes, not 7"):
        Tensor(name="a", dtype="F32", shape=(2,), data=bytes(7))
