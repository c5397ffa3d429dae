"""Messages: what is packed is unpacked bit for bit, and nothing else gets through."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from nestfed.deploy.wire import DTYPES, RejectedError, pack, unpack
from nestfed.queries.slots import Slot

words = st.dictionaries(
    st.text(max_size=5), st.one_of(st.integers(), st.text(max_size=9), st.floats(allow_nan=False), st.none())
)
content = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda k: k != "__metadata__"),
    st.sampled_from(sorted(DTYPES.values())).flatmap(lambda t: arrays.arrays(t, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0))),
    max_size=4,
)  # fmt: skip


@given(words, content)
@settings(max_examples=150, deadline=None)
def test_round_trip(said: dict[str, object], sent: dict[str, np.ndarray]) -> None:
    found = unpack(pack(said, sent))
    assert found.words == said
    got = found.arrays()
    assert got.keys() == sent.keys()
    for k, v in sent.items():
        assert got[k].dtype == v.dtype
        assert got[k].shape == v.shape
        assert got[k].tobytes() == v.tobytes()


@given(words, content, st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_messages_are_rejected_or_well_formed(
    said: dict[str, object], sent: dict[str, np.ndarray], data: st.DataObject
) -> None:
    block = bytearray(pack(said, sent))
    for _ in range(data.draw(st.integers(1, 4))):
        block[data.draw(st.integers(0, len(block) - 1))] = data.draw(st.integers(0, 255))
    block = block[: data.draw(st.integers(0, len(block)))] if data.draw(st.booleans()) else block
    try:
        found = unpack(bytes(block))
    except RejectedError:
        return
    assert sum(a.nbytes for a in found.arrays().values()) <= len(block)


@given(st.binary(max_size=200))
def test_any_bytes(block: bytes) -> None:
    with pytest.raises(RejectedError):
        unpack(block)


def header(entries: dict[str, object], body: bytes = b"", **more: object) -> bytes:
    text = json.dumps({"__metadata__": {"words": "{}"}, **entries, **more}).encode()
    return len(text).to_bytes(8, "little") + text + body


@pytest.mark.parametrize(
    "block",
    [
        header({"a": {"dtype": "F64", "shape": [2**62], "data_offsets": [0, 86]}}, bytes(86)),
        header({"a": {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]}}, bytes(8)),
        header({"a": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}, bytes(16)),
        header({"a": {"dtype": "F64", "shape": [1.0], "data_offsets": [0, 8]}}, bytes(8)),
        header({"a": {"dtype": "F64", "shape": [True], "data_offsets": [0, 8]}}, bytes(8)),
        header({"a": {"dtype": "|V0", "shape": [2**62], "data_offsets": [0, 0]}}),
        header({"a": {"dtype": ">f8", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)),
        header({"a": {"dtype": "F64", "shape": [-1], "data_offsets": [0, -8]}}),
        header(
            {
                "a": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]},
                "b": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]},
            },
            bytes(8),
        ),
        header({}, __metadata__={"words": "[" * 100_000}),
        header({}, __metadata__={"words": "[]"}),
        header({}, __metadata__={}),
        (2**62).to_bytes(8, "little") + b"{}",
        b"",
    ],
    ids=range(14),
)
def test_forged_headers(block: bytes) -> None:
    with pytest.raises(RejectedError, match="cannot be read"):
        unpack(block)


def test_nothing_is_decoded_before_the_header_fits() -> None:
    packed = unpack(pack({}, {"a": np.zeros(3)}))
    with pytest.raises(RejectedError, match=r"its a has shape \(3,\) instead of \(4\)"):
        packed.arrays({"a": Slot("<f8", (4,))})


def test_a_large_message_is_rejected_by_its_size() -> None:
    with pytest.raises(RejectedError, match="it sent 8,"):
        unpack(pack({}, {"a": np.zeros(1000)}), most=520)
