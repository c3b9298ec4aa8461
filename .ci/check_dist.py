# SPDX-License-Identifier: MIT
"""Looks into the sdist and the wheel of a folder: all that is needed is there, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

MODULES = sorted(path.stem for path in Path("pyx").glob("*.pyx"))
MODEL = [
    f"k3session/models/{p.relative_to('k3session/models')}" for p in Path("k3session/models").glob("*/*")
]
PYTHON = sorted(str(path) for path in Path("k3session").rglob("*.py"))
STUBS = sorted(str(path) for path in Path("k3session").rglob("*.pyi"))
GPU = ["k3session/_cuda/kernels.fatbin", "k3session/_cuda/kernels.json"]


def tracked(*folders: str) -> list[str]:
    """Files under version control; where there is none, those that are there."""
    found = subprocess.run(["git", "ls-files", *folders], capture_output=True, text=True, check=False)
    if found.returncode == 0 and found.stdout:
        return found.stdout.split("\n")[:-1]
    return [str(path) for folder in folders for path in Path(folder).rglob("*") if path.is_file()]


def check_wheel(path: Path) -> list[str]:
    names = zipfile.ZipFile(path).namelist()
    problems = [
        f"missing {name}" for name in [*PYTHON, *STUBS, *MODEL, "k3session/py.typed"] if name not in names
    ]
    for module in MODULES:
        if sum(name.startswith(f"k3session/_core/{module}.") and name.endswith(".so") for name in names) != 1:
            problems.append(f"expected one compiled module {module}")
    licences = [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
    if len(licences) != 1:
        problems.append("missing LICENSE")
    if len(set(GPU) & set(names)) == 1:
        problems.append(f"expected both of {', '.join(GPU)}, or neither")
    expected = {*PYTHON, *STUBS, *MODEL, *GPU, "k3session/py.typed"}
    for name in names:
        core = (
            name.startswith("k3session/_core/")
            and name.endswith(".so")
            and Path(name).name.split(".")[0] in MODULES
        )
        if name not in expected and not core and ".dist-info/" not in name:
            problems.append(f"unexpected {name}")
    return problems


def check_sdist(path: Path) -> list[str]:
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = tracked("cuda", "pyx", "k3session", "tests")
    wanted += ["LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "setup.py"]
    wanted += ["build_backend.py", "build_cuda.py"]
    problems = [f"missing {name}" for name in wanted if name not in names]
    built = (".so", ".o", ".pyc", ".fatbin")
    return problems + [f"unexpected {name}" for name in sorted(names) if name.endswith(built)]


def main(folder: Path) -> int:
    failed = 0
    for pattern, check in (("*.tar.gz", check_sdist), ("*.whl", check_wheel)):
        paths = list(folder.glob(pattern))
        if len(paths) != 1:
            print(f"{folder}: expected one {pattern}, found {len(paths)}")
            return 1
        problems = check(paths[0])
        failed |= bool(problems)
        print(f"{paths[0].name}: {paths[0].stat().st_size / 2**20:.1f} MiB, {len(problems)} problems")
        for problem in problems:
            print(f"  {problem}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
