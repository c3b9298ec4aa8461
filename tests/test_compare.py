# SPDX-License-Identifier: MIT
"""Comparisons: the first place where two sides differ is the place where one of them was changed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_tools import read_tensors, write_tensors
from session_tools import prompt

import k3session as k3
from k3session._core.ops import ISAS
from k3session.cli import main
from k3session.compare import Side, compare, compare_traces, record
from k3session.synth import synth
from k3session.trace import Trace
