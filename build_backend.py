# SPDX-License-Identifier: MIT
"""The build backend: that of setuptools, which under K3_CUDA=pip asks for nvcc as well.

The versions belong together: a compiler newer than the driver makes PTX that it does not take.
"""

from __future__ import annotations

import os
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 - the hooks that stay as they are

NVCC = "cuda-toolkit[nvcc,cudart,cccl]==13.0.*"


def _with_nvcc(requirements: list[str]) -> list[str]:
    return [*requirements, NVCC] if os.environ.get("K3_CUDA") == "pip" else requirements


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return _with_nvcc(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return _with_nvcc(build_meta.get_requires_for_build_editable(config_settings))
