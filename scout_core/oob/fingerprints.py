"""What makes two collective calls the same call: operation, tensor metadata, reduction or root. Pure.

Values that may lawfully differ between ranks (AllToAll splits, the contents of objects, the scatter list that only the
root has) are left out. Group membership is not in the word: calls are compared within one group only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

_WORD = (1 << 64) - 1
_PRIME = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Described:
    """A call's 64-bit fingerprint and, for people, its text: `all_reduce(float32[6], SUM) at train.py:31`."""

    fingerprint: int
    text: str


@lru_cache(maxsize=4096)
def describe(op: str, metadata: tuple[object, ...], site: str) -> Described:
    """The description of a call. The call site is shown and not compared: ranks may take different branches to it."""
    shown = ", ".join(str(part) for part in metadata)
    word = hashlib.blake2b(f"{op}|{metadata!r}".encode(), digest_size=8).digest()
    return Described(fingerprint=int.from_bytes(word, "little") | 1, text=f"{op}({shown}) at {site}")


@lru_cache(maxsize=1024)
def group_key(members: tuple[int, ...]) -> int:
    """A 64-bit word for a group's membership, equal on all its members."""
    return int.from_bytes(hashlib.blake2b(repr(members).encode(), digest_size=8).digest(), "little")


def digest_of(digest: int, members: tuple[int, ...], fingerprint: int) -> int:
    """The rolling digest after one more call: depends on every call and on their order."""
    mixed = (digest ^ fingerprint ^ group_key(members)) & _WORD
    mixed = (mixed * _PRIME + 1) & _WORD
    return mixed ^ (mixed >> 29)


def tensor_text(dtype: object, shape: Sequence[int]) -> str:
    """`float32[2,3]`."""
    return f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]"
