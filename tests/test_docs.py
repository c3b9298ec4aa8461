# SPDX-License-Identifier: MIT
"""The documentation is run: its code, its commands, its links, and the docstrings of everything public."""

from __future__ import annotations

import argparse
import doctest
import importlib
import inspect
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import k3session as k3
from k3session import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    str(p.relative_to(ROOT)): p
    for p in [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "examples").glob("*.md")),
    ]
    if p.is_file()
}
MODULES = sorted(m.name for m in pkgutil.iter_modules(k3.__path__) if not m.ispkg and m.name != "__main__")

in_tree = pytest.mark.skipif(
    "README.md" not in PAGES, reason="the documentation is not part of a wheel's tests"
)
pages = pytest.mark.parametrize("page", PAGES)

#: What a fenced block may be; Python and k3session commands are run.
LANGUAGES = {"python", "console", "text", "json", "mermaid"}
#: Commands that stand in the pages and are run elsewhere: by CI itself, or by tests/test_examples.py.
ELSEWHERE = ("make ", "python examples/", "pytest examples/")


def blocks(text: str) -> Iterator[tuple[str, str, int]]:
    """Language, content and first line of each fenced block."""
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield found[1], found[2], text[: found.start(2)].count("\n")


def read(page: str) -> str:
    return PAGES[page].read_text(encoding="utf-8")


@in_tree
@pages
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other in one namespace, as a reader would paste them."""
    monkeypatch.chdir(tmp_path)
    text = read(page)
    assert {language for language, _, _ in blocks(text)} <= LANGUAGES
    namespace: dict[str, object] = {"__name__": "page"}
    for language, code, line in blocks(text):
        if language == "python":
            exec(compile("\n" * line + code, page, "exec"), namespace)  # noqa: S102 - this is what the test is for


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment in which `k3session` is the package under test, installed or not."""
    folder = tmp_path / "bin"
    folder.mkdir()
    command = folder / "k3session"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -W error -m k3session "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    package = str(Path(k3.__file__).parent.parent)
    return os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": package}


def commands(page: str) -> Iterator[str]:
    """The k3session commands of a page, in order."""
    for language, content, _ in blocks(read(page)):
        for line in content.splitlines() if language == "console" else ():
            assert line.startswith("$ "), f"{page}: a console block holds commands, found {line!r}"
            if not line[2:].startswith(ELSEWHERE):
                assert line[2:].startswith("k3session "), f"{page}: {line!r} is run by no test"
                yield line[2:]


@in_tree
def test_commands_of_the_readme_run(tmp_path: Path, shell: dict[str, str]) -> None:
    """Through the shell, as a reader would type them."""
    for command in commands("README.md"):
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=shell, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert done.stderr == "", f"{command}: nothing goes to stderr where that is no terminal"


@in_tree
@pytest.mark.parametrize("page", [p for p in PAGES if p != "README.md"])
def test_commands_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in commands(page):
        assert cli.main(shlex.split(command, comments=True)[1:]) == 0, command
        out = capsys.readouterr()
        assert out.err == "", command
        assert out.out or "synth" in command, command


@in_tree
def test_readme_opens_with_the_two_commands() -> None:
    _, content, line = next(blocks(read("README.md")))
    assert line < 5
    assert [c.split("#")[0].split() for c in content.splitlines()] == [
        ["$", "make", "demo"],
        ["$", "make", "test"],
    ]


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    plain = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", plain, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@in_tree
@pages
def test_links_resolve(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", read(page)):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = (PAGES[page].parent / name).resolve() if name else PAGES[page]
        assert file.exists(), f"{page}: {target}"
        assert file.is_relative_to(ROOT), f"{page}: {target} leaves the project"
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), f"{page}: {target}"


@in_tree
@pages
def test_files_that_are_named_exist(page: str) -> None:
    named = re.findall(
        r"\b((?:cuda|pyx|k3session|tests|benches|docs|examples)/[\w./-]*\w\.[a-z]+)\b", read(page)
    )
    missing = {n for n in named if not (ROOT / n).exists()}
    assert not missing, f"{page}: {missing}"


@in_tree
def test_every_page_can_be_reached() -> None:
    linked = set(re.findall(r"\]\((docs/\w+\.md|examples/README\.md)\)", read("README.md")))
    assert linked == set(PAGES) - {"README.md"}


def parsers(top: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, parser in action.choices.items():
                yield from parsers(parser, f"{name} {word}".strip())
            return
    yield name, top


@in_tree
def test_every_option_is_documented() -> None:
    text = read("docs/cli.md")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    common = text[: text.index("\n## ")]
    every = dict(parsers(cli._parser()))
    assert {name.split()[0] for name in every} == set(sections)
    for name, parser in every.items():
        command, _, action = name.partition(" ")
        if action:
            assert f"`{action} FILE" in sections[command]
        for option in (o for a in parser._actions for o in a.option_strings if o.startswith("--")):
            assert option in sections[command] + common, f"{name}: {option}"


@in_tree
def test_every_environment_variable_is_documented() -> None:
    env = importlib.import_module("k3session.env")
    names = set(re.findall(r"K3_[A-Z_]+", inspect.getsource(env)))
    assert names == set(re.findall(r"`(K3_[A-Z_]+)`", read("docs/embedding.md")))


# ---------------------------------------------------------------- docstrings


PUBLIC = {name: getattr(k3, name) for name in k3.__all__ if name != "__version__"}
#: Where an array comes in or goes out, its dtype and shape; where an error of ours can come out, which.
SHAPES = {
    "Session.step": "float32[vocab]",
    "Session.prefill": "float32[n, hidden_size]",
    "Session.logits": "float32[vocab]",
    "Session.tokens": "int32[position]",
    "Snapshot": "int32[position]",
    "LayerSnapshot": "float32[head, key, value]",
    "Sampling.choose": "float32[vocab]",
}
RAISES = (
    "Model.open", "Model.close", "Session.step", "Session.prefill", "Session.restore", "Session.save", "Session.load",
    "Sampling.choose",
)  # fmt: skip


def members(name: str, thing: object) -> Iterator[tuple[str, str | None]]:
    """Name and docstring of a public thing and of what it defines itself."""
    if not inspect.isclass(thing):
        yield name, inspect.getdoc(thing)
        return
    yield name, vars(thing).get("__doc__")
    own = {}
    for base in reversed(thing.__mro__):  # a session is made of several classes of this package
        if base.__module__.startswith("k3session"):
            own |= vars(base)
    # What a named tuple generates is described by its own docstring.
    generated = {
        "count",
        "index",
        *getattr(thing, "_fields", ()),
        *getattr(thing, "__dataclass_fields__", ()),
    }
    for key, value in own.items():
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if (
            not key.startswith("_")
            and key not in generated
            and (callable(function) or isinstance(function, property))
        ):
            yield f"{name}.{key}", function.__doc__


DOCSTRINGS = {key: text for name, thing in PUBLIC.items() for key, text in members(name, thing)}


def test_everything_public_has_a_docstring() -> None:
    assert len(DOCSTRINGS) > 60
    assert [key for key, text in DOCSTRINGS.items() if not (text or "").strip()] == []


def test_docstrings_give_shapes_and_errors() -> None:
    assert {k for k, wanted in SHAPES.items() if wanted not in (DOCSTRINGS[k] or "")} == set()
    assert {k for k in RAISES if "Raises\n" not in (DOCSTRINGS[k] or "")} == set()


def test_docstrings_name_parameters_as_they_are() -> None:
    """Every parameter that a Parameters section lists exists."""
    for name, thing in PUBLIC.items():
        for key, text in members(name, thing):
            listed = re.search(
                r"Parameters\n\s*-+\n(.*?)(?=\n\s*\n\s*\w+\n\s*-+\n|\Z)", text or "", re.DOTALL
            )
            if listed is None:
                continue
            indent = re.search(r"^ *", listed[1])
            names = re.findall(rf"^{indent[0] if indent else ''}(\w[\w, ]*)$", listed[1], re.MULTILINE)
            target = thing if key == name else inspect.getattr_static(thing, key.partition(".")[2])
            target = target.__func__ if isinstance(target, (classmethod, staticmethod)) else target
            known = set(inspect.signature(target).parameters)
            assert {n.strip() for group in names for n in group.split(",")} <= known, key


@pytest.mark.parametrize("module", MODULES)
def test_doctests(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = doctest.testmod(importlib.import_module(f"k3session.{module}"))
    assert found.failed == 0


def test_the_first_example_of_the_package_runs() -> None:
    found = doctest.testmod(k3)
    assert found.attempted > 0
    assert found.failed == 0


@in_tree
def test_figures_of_the_pages_come_from_results() -> None:
    figures = runpy.run_path(str(ROOT / "benches" / "figures.py"))
    for page, tables in figures["PAGES"].items():
        text = read(page)
        assert set(re.findall(r"<!-- figures: (\w+) -->", text)) == set(tables)
        for name, make in tables.items():
            assert figures["block"](name, make()) in text, f"{page}, {name}: run benches/figures.py --write"
