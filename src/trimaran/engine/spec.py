"""What an engine process is started with, and what must agree between it and its launcher.

Owns: ``EngineSpec`` and the fingerprint of a configuration. Light: the supervisor imports it, and
has no use for the scheduler. Called by launch/ (writes) and ``engine_core_proc`` (reads).
"""

import msgspec

from trimaran.config import EngineConfig, fields
from trimaran.ipc.progress_board import BoardPlace

# The settings in which all engines of a deployment must agree.
_AGREED = ("model", "dtype", "block_size")


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that one engine process is given."""

    config: EngineConfig
    rank: int
    incarnation: int  # tells this life of the rank from the ones before
    handshake_address: str
    spawned_at: float  # wall seconds at which the launcher decided to start it
    num_engines_on_host: int = 1  # that share this host's free memory
    board: BoardPlace | None = None  # where to say what it does; None: nobody watches


def fingerprint(config: EngineConfig) -> str:
    """The agreed settings as ``"model=… dtype=… block_size=…"``: comparable, and readable."""
    values = {
        field.name: getattr(getattr(config, field.section), field.name)
        for field in fields(EngineConfig)
        if field.name in _AGREED
    }
    return "\n".join(f"{name}={values[name]}" for name in _AGREED)


def fingerprint_difference(ours: str, theirs: str) -> str:
    """Both sides' values where they differ, each with the flag that sets it; "" if nowhere."""
    mine, other = _settings(ours), _settings(theirs)
    return "; ".join(
        f"--{name.replace('_', '-')} is {mine.get(name)} here and {other.get(name)} there"
        for name in sorted(mine.keys() | other.keys())
        if mine.get(name) != other.get(name)
    )


def _settings(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
