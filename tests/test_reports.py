# SPDX-License-Identifier: MIT
"""README.md of this folder names tests that exist, and every file of tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
README = HERE / "README.md"

pytestmark = pytest.mark.skipif(not README.is_file(), reason="the table is not part of a wheel's tests")


def functions(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", README.read_text())
    assert len(named) > 60
    missing = [
        f"{f}::{name}" for f, name in named if not (HERE / f).is_file() or name not in functions(HERE / f)
    ]
    assert not missing


def test_every_item_has_a_test_or_waits() -> None:
    rows = re.findall(
        r"^\| ([NLSEA]\d\d(?:, [NLSEA]\d\d)*) \|([^|]+)\|([^|]*)\|([^|]*)\|$",
        README.read_text(),
        re.MULTILINE,
    )
    items = [item for row in rows for item in row[0].split(", ")]
    assert len(items) == len(set(items)) == 66
    assert all("test_" in tests or later.strip() for _, _, tests, later in rows)


def test_every_file_of_tests_is_in_the_table() -> None:
    text = README.read_text()
    patterns = [
        re.compile(p.replace(".", r"\.").replace("*", r"\w*"))
        for p in re.findall(r"`(test_[\w*]+\.py)`", text)
    ]
    for file in HERE.glob("test_*.py"):
        assert any(p.fullmatch(file.name) for p in patterns), file.name
