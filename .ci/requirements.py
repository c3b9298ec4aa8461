# SPDX-License-Identifier: MIT
"""Prints the requirements of one extra of pyproject.toml, or of the build, one a line."""

from __future__ import annotations

import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
group = sys.argv[1]
extras = {**project["project"]["optional-dependencies"], "build": project["build-system"]["requires"]}
print(*extras[group], sep="\n")
