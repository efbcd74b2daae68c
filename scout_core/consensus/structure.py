"""64-bit signatures of argument structures: what peers must have in common before their tensors can be compared."""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import xxhash


def structure_signature(value: object) -> int:
    """Signature of a nested value's types, keys and plain values, with dtype and shape standing for each tensor.

    Distinguishes types (1, 1.0, True and "1"; (1,) and [1]; 0.0 and -0.0) and subclasses by qualified name. Order
    counts in sequences and not in mappings and sets; every NaN is the same. Understands None, bool, int, float,
    complex, str, bytes, enums, list, tuple, named tuples, mappings, sets, slices, ranges, dataclass instances, torch
    dtypes, devices, sizes and tensors. Any other object counts by its qualified type name alone. A container that
    holds itself is described by how far up the repetition starts.

    Equal in every process: neither `hash()`, addresses nor pickles enter. Local, no collective, reads no tensor data.

    Returns: an int in [0, 2^64).
    Raises: RecursionError for nesting beyond the interpreter's limit.
    """
    return xxhash.xxh3_64_intdigest(_encode(value, ()))


def _encode(value: object, above: tuple[int, ...]) -> bytes:
    """Canonical encoding, prefix-free; `above` holds the ids of the containers that `value` is inside of."""
    if id(value) in above:
        return _record("cycle", _integer(len(above) - above.index(id(value))))
    if isinstance(value, enum.Enum):
        # By name as well as value: members may hold objects that differ only in what this encoding does not see.
        return _record("enum", _name(value), _text(str(value.name)), _encode(value.value, (*above, id(value))))
    if isinstance(value, torch.Tensor):
        # Parameter or plain tensor, leaf or not: the same data may come either way, so only dtype and shape count.
        return _record("tensor", _text(str(value.dtype)), *map(_integer, value.shape))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value, (*above, id(value)))
    for base, encode in _LEAVES:
        if isinstance(value, base):
            return _tagged(value, base, [encode(value)])
    for base, parts in _CONTAINERS:
        if isinstance(value, base):
            return _tagged(value, base, parts(value, (*above, id(value))))
    return _record("object", _name(value))


def _dataclass(value: Any, above: tuple[int, ...]) -> bytes:
    """A field declared with init=False may be missing from the instance; it then counts as an empty record."""
    parts = [_name(value)]
    for field in dataclasses.fields(value):
        missing = not hasattr(value, field.name)
        parts += [_text(field.name), _record("unset") if missing else _encode(getattr(value, field.name), above)]
    return _record("dataclass", *parts)


def _tagged(value: object, base: type, parts: Iterable[bytes]) -> bytes:
    """The record of a value of type `base`; a subclass carries its own name, so that it differs from its base."""
    if type(value) is base:
        return _record(base.__name__, *parts)
    return _record("subclass", _name(value), _record(base.__name__, *parts))


def _record(tag: str, *parts: bytes) -> bytes:
    """tag, number of parts, then each part with its length: no two different records share an encoding."""
    head = tag.encode()
    lengths = struct.pack(f"<BQ{len(parts)}Q", len(head), len(parts), *map(len, parts))
    return b"".join((lengths, head, *parts))


def _name(value: object) -> bytes:
    return _text(f"{type(value).__module__}.{type(value).__qualname__}")


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _integer(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _real(value: float) -> bytes:
    # The sign and payload of a NaN depend on the instruction that made it, so they say nothing about the structure.
    return b"nan" if value != value else struct.pack("<d", value)


def _items(value: Iterable[object], above: tuple[int, ...]) -> list[bytes]:
    return [_encode(item, above) for item in value]


def _named_items(value: tuple[object, ...], above: tuple[int, ...]) -> list[bytes]:
    """A named tuple's field names come first: two classes of one name may differ in them."""
    names = getattr(value, "_fields", ())
    return [_record("fields", *(_text(str(name)) for name in names)), *_items(value, above)]


def _entries(value: Mapping[object, object], above: tuple[int, ...]) -> list[bytes]:
    return sorted(_record("entry", _encode(key, above), _encode(item, above)) for key, item in value.items())


# First match wins, so a subclass (bool, torch.Size) stands before its base (int, tuple).
_LEAVES: tuple[tuple[type, Callable[[Any], bytes]], ...] = (
    (type(None), lambda _: b""),
    (bool, lambda value: b"\1" if value else b"\0"),
    (int, lambda value: _integer(int(value))),
    (float, lambda value: _real(float(value))),
    (complex, lambda value: _record("parts", _real(value.real), _real(value.imag))),
    (str, _text),
    (bytes, bytes),
    (bytearray, bytes),
    (torch.dtype, lambda value: _text(str(value))),
    (torch.device, lambda value: _text(str(value))),
    (torch.layout, lambda value: _text(str(value))),
    (torch.memory_format, lambda value: _text(str(value))),
    (range, lambda value: _record("bounds", _integer(value.start), _integer(value.stop), _integer(value.step))),
)

_CONTAINERS: tuple[tuple[type, Callable[[Any, tuple[int, ...]], list[bytes]]], ...] = (
    (torch.Size, _items),
    (tuple, _named_items),
    (list, _items),
    (set, lambda value, above: sorted(_items(value, above))),
    (frozenset, lambda value, above: sorted(_items(value, above))),
    (dict, _entries),
    (Mapping, _entries),
    (slice, lambda value, above: _items((value.start, value.stop, value.step), above)),
)
