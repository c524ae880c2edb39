"""Bytes that almost mean something: valid samples with some of it changed, and plain noise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

NASTY_BYTES = (
    b"",
    b"\0",
    b"\xff" * 9,
    b"\xff" * 64,
    b"\0" * 4096,
    b"NaN",
    b"1e999",
    b"-0.0",
    b"1e-40",
    b"9223372036854775808",
    b"9" * 5000,
    b"[" * 5000,
    b'{"a":' * 3000,
    "\u202e\ud7ff\U0010ffff".encode(),
    b"\x1b[2J",
    b"../" * 50,
    b"\xed\xa0\x80",
    b"\r\n",
)
NASTY_VALUES: tuple[object, ...] = (
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    -(2**63),
    10**400,
    float("nan"),
    float("inf"),
    -0.0,
    1e38,
    1e-40,
    "",
    "\0",
    "\x1b[2J",
    "../../x",
    "a" * 10_000,
    "\ud800",
    [],
    {},
    [[]],
    {"": None},
    ["a", "a"],
)
_NASTY = st.sampled_from(NASTY_VALUES).map(deepcopy)
_NUMBERS = (-(2**63), -(2**31), -1, 0, 1, 2, 1000, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
_FLOATS = (0.0, -0.0, -1.0, 1e-40, 1e38, 1.5, float("nan"), float("inf"), float("-inf"))
_TEXTS = ("", "north", "run-1", "\0", "\x1b[2J\r\n", "../../etc", "a" * 5000, "\U0010ffff", "0" * 64)


@st.composite
def mutated(draw: st.DrawFn, samples: Sequence[bytes]) -> bytes:
    """Change a sample at up to four places: flip, cut out, repeat, put in, or end there."""
    data = bytearray(draw(st.sampled_from(samples)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        size = draw(st.sampled_from((1, 2, 4, 8, 64, 1024)))
        match draw(st.sampled_from(("flip", "drop", "repeat", "put", "end"))):
            case "flip" if at < len(data):
                data[at] ^= draw(st.integers(1, 255))
            case "drop":
                del data[at : at + size]
            case "repeat":
                data[at:at] = data[at : at + size]
            case "put":
                data[at:at] = draw(st.sampled_from(NASTY_BYTES))
            case _:
                del data[at:]
    return bytes(data)


@st.composite
def mutated_json(draw: st.DrawFn, samples: Sequence[bytes]) -> bytes:
    """Put other values at one to three places of a JSON text."""
    document = json.loads(draw(st.sampled_from(samples)))
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(document))
        if not places:
            return json.dumps(draw(_NASTY)).encode()
        holder, key = draw(st.sampled_from(places))
        match draw(st.sampled_from(("value", "value", "remove", "add"))):
            case "remove":
                del holder[key]
            case "add" if isinstance(holder, dict):
                holder["unknown"] = draw(_NASTY)
            case _:
                holder[key] = draw(_NASTY)
    return json.dumps(document).encode()


def _places(value: object) -> list[tuple[Any, Any]]:
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value[:50]))
    return [(value, key) for key, _ in items] + [place for _, inner in items for place in _places(inner)]


def changed(draw: st.DrawFn, sample: Message, depth: int = 3) -> bytes:
    """Set up to five fields of a message, at any depth, to numbers and texts that nobody expects; serialise it."""
    found = type(sample)()
    found.CopyFrom(sample)
    for _ in range(draw(st.integers(0, 5))):
        _change(draw, found, depth)
    return found.SerializeToString()


def _change(draw: st.DrawFn, message: Message, depth: int) -> None:
    described: Descriptor = message.DESCRIPTOR
    if not described.fields:
        return
    field = draw(st.sampled_from(list(described.fields)))
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return
    repeated = field.is_repeated
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        inner = getattr(message, field.name).add() if repeated else getattr(message, field.name)
        inner.SetInParent()
        if depth:
            _change(draw, inner, depth - 1)
        return
    value = draw(_scalar(field))
    if repeated:
        getattr(message, field.name).extend([value] * draw(st.sampled_from((1, 2, 200))))
    else:
        setattr(message, field.name, value)


def _scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return st.sampled_from(NASTY_BYTES if field.type == FieldDescriptor.TYPE_BYTES else _TEXTS)
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return st.sampled_from(_FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    low, high = {
        FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
        FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
        FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
        FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
        FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
    }[kind]
    return st.sampled_from([n for n in _NUMBERS if low <= n <= high])


def any_bytes(samples: Sequence[bytes], is_json: bool = False) -> st.SearchStrategy[bytes]:
    """Give noise, nasty bytes, and changed samples."""
    kinds = [st.binary(max_size=300), st.sampled_from(NASTY_BYTES), mutated(samples), mutated(samples)]
    return st.one_of(*kinds, mutated_json(samples), mutated_json(samples)) if is_json else st.one_of(*kinds)
