"""Private names of libraries that this project uses: each has a reason, and fails here when a release renames it."""

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "vit_finetune"


def private_uses(path: Path) -> list[tuple[int, str]]:
    """Line and name of every private attribute that the file itself does not define."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and _is_self(n)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    found = [(n.lineno, n.attr) for n in nodes if isinstance(n, ast.Attribute) and re.match(r"_[a-z]", n.attr)]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("vit_finetune"):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            found += [(node.lineno, name) for name in names if re.match(r"_[A-Za-z]", name) and name != "__future__"]
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and str(name.value).startswith("_"):
                found.append((node.lineno, str(name.value)))
    return [(line, name) for line, name in found if name not in own and name not in {"_asdict", "__future__"}]


def _is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


USES = [(path, line, name) for path in sorted(PACKAGE.rglob("*.py")) for line, name in private_uses(path)]


def test_there_are_few() -> None:
    assert len(USES) <= 16, [(path.name, line, name) for path, line, name in USES]


@pytest.mark.parametrize(("path", "line", "name"), USES, ids=lambda value: getattr(value, "stem", str(value)))
def test_each_has_its_reason(path: Path, line: int, name: str) -> None:
    """A comment on the line, or on one of the three lines before it."""
    lines = path.read_text().splitlines()[max(0, line - 4) : line]
    assert any("#" in text for text in lines), f"{path.name}:{line} uses {name} without a comment"
