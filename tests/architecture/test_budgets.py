"""What fits in one head: sizes of files, functions, classes and parameter lists."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "trimaran"
CORE = ("scheduling", "engine", "client", "launch", "executor", "worker", "ipc")
FILES = sorted(SOURCE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
# Kernel wrappers mirror a C signature; public constructors name what they take.
PARAMETERS_FREE = ("model/kernels/",)


def lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_source_file(path):
    assert lines(path) <= 500, f"{path}: {lines(path)} lines, the budget is 500"
    place = path.relative_to(SOURCE).as_posix()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 60, f"{place}:{node.lineno} {node.name}: {length} lines, at most 60"
            arguments = node.args
            names = [a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]
            count = len([name for name in names if name not in ("self", "cls")])
            if node.name != "__init__" and not place.startswith(PARAMETERS_FREE):
                assert count <= 7, f"{place}:{node.lineno} {node.name}: {count} parameters, most 7"
        elif isinstance(node, ast.ClassDef):
            public = [
                child.name
                for child in node.body
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                and not child.name.startswith("_")
            ]
            assert len(public) <= 20, f"{place}:{node.lineno} {node.name}: {len(public)} methods"


@pytest.mark.parametrize("path", TESTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_test_file(path):
    assert lines(path) <= 700, f"{path}: {lines(path)} lines, the budget is 700"


def test_the_core_is_readable():
    total = sum(lines(path) for path in FILES if path.relative_to(SOURCE).parts[0] in CORE)
    assert total <= 10_000, f"the core has {total} lines, the budget is 10,000"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_modules_say_what_they_own(path):
    assert ast.get_docstring(ast.parse(path.read_text("utf-8"))), f"{path} has no docstring"
