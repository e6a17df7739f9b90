"""Identifiers: unique without coordination, short enough to read in a log.

Owns: how request ids, incarnations and wire identities are made. Knows nothing of what they name.
"""

import itertools
import os
import secrets

_counter = itertools.count()
# One random part per process, refreshed after a fork, so that two front ends never share ids.
_prefix: tuple[int, str] = (0, "")


def unique_id() -> str:
    """A process-wide unique internal id such as ``"9f3ac41b-17"``; never chosen by a client."""
    global _prefix
    if _prefix[0] != os.getpid():
        _prefix = (os.getpid(), secrets.token_hex(4))
    return f"{_prefix[1]}-{next(_counter)}"


def external_id(kind: str) -> str:
    """An id shown to API users, for example ``"cmpl-…"`` or ``"chatcmpl-…"``."""
    return f"{kind}-{secrets.token_hex(12)}"


def new_incarnation() -> int:
    """A number that tells one life of a process from the next under the same rank (63 bits)."""
    return secrets.randbits(62) + 1


def engine_identity(rank: int) -> bytes:
    """The wire identity of an engine: its rank as two little-endian bytes (S21)."""
    if not 0 <= rank < 1 << 16:
        raise ValueError(f"rank {rank} does not fit two bytes")
    return rank.to_bytes(2, "little")


def rank_of_identity(identity: bytes) -> int:
    """The rank in a two-byte wire identity.

    Raises ValueError: the identity is not two bytes.
    """
    if len(identity) != 2:
        raise ValueError(f"an engine identity has two bytes, got {len(identity)}")
    return int.from_bytes(identity, "little")
