"""The table of guarantees in docs/testing.md: which tests hold each of them, and in which tier these run.

    python tests/guarantees.py

writes the tiers into the table as the tests' marks have them. What the marks are is read from the sources, without importing them.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/testing.md"
BEGIN, END = "<!-- guarantees -->", "<!-- end -->"
HEADER = ("guarantee", "test", "tier")
FIRST, SOAK, BOTH, BENCHMARK = "first", "soak", "first, soak", "benchmark"


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        number: of the line in the page, from 1 on.
        guarantee: empty where the line names another test of the guarantee above it.
        test: `path::function`, or the path of a benchmark.
    """

    number: int
    guarantee: str
    test: str
    tier: str


def rows(page: str) -> list[Row]:
    """All lines of all tables between the markers; a line that is not of three cells is an error."""
    found = []
    inside = False
    for number, line in enumerate(page.splitlines(), 1):
        inside = line == BEGIN or (inside and line != END)
        if not inside or not line.startswith("|") or set(line) <= set("|- "):
            continue
        cells = tuple(cell.strip() for cell in line.strip("|").split("|"))
        if len(cells) != len(HEADER):
            raise ValueError(f"line {number} of the page has {len(cells)} cells instead of {len(HEADER)}: {line}")
        if cells != HEADER:
            found.append(Row(number, cells[0], cells[1].strip("`"), cells[2]))
    return found


def tier(test: str, root: Path = ROOT) -> str | None:
    """The tier in which a test runs, or that it is a benchmark; None if there is no such thing."""
    path, _, name = test.partition("::")
    if not (root / path).is_file():
        return None
    if not name:
        return BENCHMARK if path.startswith("benchmarks/") else None
    module = _parsed(root / path)
    function = next((node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name), None)
    if function is None or not name.startswith("test_"):
        return None
    named = {name: node for node in module.body for name in _names(node)}
    whole = [*function.decorator_list, *_elements(_value(named.get("pytestmark")))]
    if any(_is_soak(mark, named) for mark in whole):
        return SOAK
    if any(argument.arg == "rounds" for argument in function.args.args):  # see tests/conftest.py
        return BOTH
    return BOTH if any(_mentions_soak(part, named) for part in _parameters(function, named)) else FIRST


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _names(node: ast.stmt) -> list[str]:
    """What a statement of a module gives a name to."""
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom) and node.module == "soak":
        return [alias.asname or alias.name for alias in node.names if alias.name in ("soaked", "soaked_after")]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _value(node: ast.AST | None) -> ast.AST | None:
    return node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None


def _elements(node: ast.AST | None) -> list[ast.AST]:
    """The marks of a `pytestmark`, which is one or a list of them."""
    return list(node.elts) if isinstance(node, ast.List | ast.Tuple) else [node] if node is not None else []


def _is_soak(mark: ast.AST, named: dict[str, ast.stmt]) -> bool:
    """Whether this is `pytest.mark.soak`, called or not, or a name for it."""
    if isinstance(mark, ast.Call):
        mark = mark.func
    if isinstance(mark, ast.Name):
        value = _value(named.get(mark.id))
        return value is not None and _is_soak(value, named)
    return ast.unparse(mark) == "pytest.mark.soak"


def _parameters(function: ast.FunctionDef, named: dict[str, ast.stmt]) -> Iterator[ast.AST]:
    """Where the parameters of a test come from."""
    yield from function.decorator_list
    generate = named.get("pytest_generate_tests")
    if generate is not None:
        words = {node.value for node in ast.walk(generate) if isinstance(node, ast.Constant)}
        if any(argument.arg in words for argument in function.args.args):
            yield generate


def _mentions_soak(part: ast.AST, named: dict[str, ast.stmt]) -> bool:
    """Whether the mark stands there, or in what is named there."""
    left, seen = [part], set[str]()
    while left:
        for node in ast.walk(left.pop()):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.soak":
                return True
            if isinstance(node, ast.ImportFrom):  # `soak.soaked` and `soak.soaked_after`, which mark parameters
                return True
            if isinstance(node, ast.Name) and node.id in named and node.id not in seen:
                seen.add(node.id)
                left.append(named[node.id])
    return False


def with_tiers(page: str) -> str:
    """The page with the tiers as they are; tests that do not exist keep what is written."""
    lines = page.splitlines()
    for row in rows(page):
        lines[row.number - 1] = f"| {row.guarantee} | `{row.test}` | {tier(row.test) or row.tier} |"
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(with_tiers(PAGE.read_text()))
    missing = [row.test for row in rows(PAGE.read_text()) if tier(row.test) is None]
    sys.exit("\n".join(f"there is no {test}" for test in missing) or None)
