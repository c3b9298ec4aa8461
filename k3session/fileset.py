# SPDX-License-Identifier: MIT
"""Which files make up a checkpoint folder, and whether each of them is whole.

Everything here is looked at before a byte of a tensor is used: a missing, cut or mislabelled shard
that is mapped and read gives plausible numbers, not an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3session.config_rules import parse_json_file, show
from k3session.errors import CheckpointError
from k3session.progress import Progress
from k3session.safetensors_io import Header, read_header

__all__ = ["INDEX", "FileSet", "read_files"]

INDEX = "model.safetensors.index.json"


@dataclass(slots=True)
class FileSet:
    """The files of a folder and what their headers hold, with every problem found on the way.

    ``where`` maps the name of each tensor, as the files spell it, to its file.  ``lost`` holds the
    names that the index places in a file that is missing or broken.
    """

    headers: dict[str, Header] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    total_size: int | None = None


def read_files(folder: Path, progress: Progress, needed: Callable[[str], bool] | None = None) -> FileSet:
    """Find the files of `folder` and check all of their headers.

    `needed` says of a tensor's name, as the index spells it, whether it is needed; None needs all.  A file in which
    none are needed may be missing.
    """
    files = FileSet()
    try:
        listing = sorted(os.listdir(folder))
    except OSError as error:
        files.problems.append(f"the folder cannot be read: {error.strerror or error}.")
        return files
    present = [name for name in listing if name.endswith(".safetensors")]
    weight_map: dict[str, str] | None = None
    if INDEX in listing:
        weight_map = _read_index(folder, present, files)
        if weight_map is None:
            return files
        names = sorted(set(weight_map.values()))
    elif len(present) == 1:
        names = present
    else:
        found = f"{len(present)} safetensors files" if present else "no safetensors file"
        files.problems.append(f"found {found} and no {INDEX}; expected one file, or shards with their index.")
        return files
    missing = [name for name in names if not os.path.isfile(folder / name)]
    if needed is not None and weight_map is not None:
        called_for = {file for name, file in weight_map.items() if file in missing and needed(name)}
        names = [name for name in names if name not in missing or name in called_for]
        missing = [name for name in missing if name in called_for]
    if missing:
        files.problems.append(
            f"{INDEX}: {len(missing)} of {len(names)} files are missing: {', '.join(missing)}; fetch them again."
        )
    absent = set(missing)
    for done, name in enumerate(names, start=1):
        if name not in absent:
            try:
                files.headers[name] = read_header(folder / name)
            except CheckpointError as error:
                files.problems.append(str(error))
        progress("open", done, len(names))
    _place(files, weight_map)
    return files


def _read_index(folder: Path, present: list[str], files: FileSet) -> dict[str, str] | None:
    value, problem = parse_json_file(folder / INDEX)
    if problem:
        files.problems.append(f"{INDEX}: {problem}")
        return None
    weight_map: Any = value.get("weight_map") if isinstance(value, Mapping) else None
    if not isinstance(weight_map, dict) or not weight_map:
        files.problems.append(f"{INDEX}: weight_map is {show(weight_map)}; expected an object of file names.")
        return None
    files_named = {file for file in weight_map.values() if isinstance(file, str)}
    good = {file for file in files_named if file not in ("", ".", "..") and Path(file).name == file}
    bad = [(k, v) for k, v in weight_map.items() if not isinstance(v, str) or v not in good]
    for name, file in bad[:3]:
        files.problems.append(
            f"{INDEX}: {name} is placed in {show(file)}; expected the name of a file in the same folder."
        )
    if bad:
        return None
    stray = sorted(set(present) - set(weight_map.values()))
    if stray:
        files.warnings.append(f"{INDEX} does not name {', '.join(stray)}; ignored.")
    metadata = value.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    files.total_size = total if type(total) is int else None
    return weight_map


def _place(files: FileSet, weight_map: dict[str, str] | None) -> None:
    """Merge the headers into one table and compare it with the index."""
    twice: list[tuple[str, str, str]] = []
    for file, header in files.headers.items():
        for name in header.tensors:
            other = files.where.setdefault(name, file)
            if other != file:
                twice.append((name, other, file))
    for name, one, other in twice[:10]:
        files.problems.append(f"{name} stands in {one} and in {other}; expected it once.")
    if len(twice) > 10:
        files.problems.append(f"{len(twice) - 10} more tensors stand in two files.")
    if weight_map is None:
        return
    doubled = {name for name, _, _ in twice}
    wrong: list[str] = []
    for name, file in weight_map.items():
        if file not in files.headers:
            files.lost.add(name)
        elif name not in files.where:
            wrong.append(f"{INDEX}: {name} is placed in {file}, which does not hold it.")
            files.lost.add(name)
        elif files.where[name] != file and name not in doubled:
            wrong.append(f"{INDEX}: {name} is placed in {file}, but stands in {files.where[name]}.")
    extra = [name for name in files.where if name not in weight_map]
    wrong += [f"{INDEX}: {name} of {files.where[name]} is not in weight_map." for name in extra]
    files.problems += wrong[:10]
    if len(wrong) > 10:
        files.problems.append(f"{INDEX}: {len(wrong) - 10} more entries disagree with the files.")
    stored = sum(info.nbytes for header in files.headers.values() for info in header.tensors.values())
    whole = len(files.headers) == len(set(weight_map.values()))
    if whole and files.total_size not in (None, stored):
        files.warnings.append(f"{INDEX}: total_size is {files.total_size}; the files hold {stored} bytes.")
