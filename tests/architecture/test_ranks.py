"""Imports go one way: proven from the syntax tree, function-local imports included."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "trimaran"
RANKS = {
    "clock": 0, "ids": 0, "logging": 0, "errors": 0,
    "formats": 1, "ipc": 1, "process": 1, "sampling_params": 1,
    "config": 2, "messages": 2,
    "text": 3, "scheduling": 3, "grammar": 3, "metrics": 3,
    "model": 4, "worker": 5, "executor": 6, "engine": 7, "launch": 8, "client": 9, "server": 10,
    "bench": 11, "simulate": 11, "cli": 12,
}  # fmt: skip
# Lazily resolved entry points: the package root, and `python -m trimaran`.
UNRANKED = {"__init__", "__main__"}
# Library -> the only places that may import it.
ONLY_IN = {
    "torch": ("model/", "worker/", "executor/"),
    "zmq": ("ipc/",),
    "ray": ("launch/ray", "executor/ray"),
    "fastapi": ("server/",),
    "starlette": ("server/",),
    "uvicorn": ("server/",),
    "pickle": (), "cloudpickle": (), "dill": (), "marshal": (), "multiprocessing": (),
}  # fmt: skip
NOT_IN = {"torch": ("executor/mock", "executor/base")}
FILES = sorted(SOURCE.rglob("*.py"))


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> list[tuple[int, str]]:
    """(line, absolute module name) of every import outside `if TYPE_CHECKING` at package root."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write absolute imports"
            base = node.module or ""
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def test_every_package_has_a_rank():
    unknown = {package_of(path) for path in FILES} - set(RANKS) - UNRANKED
    assert not unknown, f"give these a rank: {unknown}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_down(path):
    package = package_of(path)
    if package in UNRANKED:
        return
    for line, module in imported_modules(path):
        if module.split(".")[0] != "trimaran":
            continue
        parts = module.split(".")
        if parts[1] in UNRANKED or parts[1] not in RANKS:
            continue  # a name of the package root, such as __version__
        assert parts[1] == package or RANKS[parts[1]] < RANKS[package], (
            f"{path}:{line}: {package} (rank {RANKS[package]}) imports {module}"
        )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_libraries_stay_behind_their_seams(path):
    place = path.relative_to(SOURCE).as_posix()
    for line, module in imported_modules(path):
        library = module.split(".")[0]
        if library in ONLY_IN:
            allowed = place.startswith(ONLY_IN[library]) if ONLY_IN[library] else False
            banned = place.startswith(NOT_IN.get(library, ("\0",)))
            assert allowed, f"{place}:{line} imports {library}"
            assert not banned, f"{place}:{line} imports {library}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_only_config_reads_the_environment(path):
    place = path.relative_to(SOURCE).as_posix()
    if place == "config.py" or place.startswith("process/"):
        return
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
            raise AssertionError(f"{place}:{node.lineno} reads the environment; config.py may")
