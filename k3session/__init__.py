# SPDX-License-Identifier: MIT
"""Run models of the Kimi K3 architecture inside a Python program, as a stateful session.

>>> import k3session as k3
>>> with k3.Model.open() as model, model.session() as s:
...     logits = s.prefill([82, 79, 77])        # float32[vocab]
...     logits = s.step(int(logits.argmax()))
...     snap = s.snapshot()                     # everything that the session is
...     s.restore(snap)                         # and exactly that again
"""

import logging as _logging

__version__ = "0.1.0"

from k3session.config import K3Config
from k3session.errors import (
    BatchError,
    CapacityError,
    CheckpointError,
    ClosedError,
    ConfigError,
    DeviceError,
    DeviceMemoryError,
    InvalidTokenError,
    K3Error,
    NonFiniteError,
    PassCancelled,
    RewindError,
    SessionBusyError,
    SnapshotCorruptError,
    SnapshotError,
    SnapshotMismatchError,
)
from k3session.generation import Generated
from k3session.marks import Kept, Mark, Marks
from k3session.model import Model
from k3session.sampling import Sampling
from k3session.saving import SaveJob
from k3session.score import Score
from k3session.session import Session
from k3session.session.drafts import Draft
from k3session.snapshot import LayerSnapshot, MarkSnapshot, Snapshot
from k3session.stage import Boundary, Segment, Stage
from k3session.stats import Stats
from k3session.times import OpTime, Times
from k3session.trace import Trace

_logging.getLogger("k3session").addHandler(_logging.NullHandler())

__all__ = [
    "BatchError",
    "Boundary",
    "CapacityError",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "DeviceError",
    "DeviceMemoryError",
    "Draft",
    "Generated",
    "InvalidTokenError",
    "K3Config",
    "K3Error",
    "Kept",
    "LayerSnapshot",
    "Mark",
    "MarkSnapshot",
    "Marks",
    "Model",
    "NonFiniteError",
    "OpTime",
    "PassCancelled",
    "RewindError",
    "Sampling",
    "SaveJob",
    "Score",
    "Segment",
    "Session",
    "SessionBusyError",
    "Snapshot",
    "SnapshotCorruptError",
    "SnapshotError",
    "SnapshotMismatchError",
    "Stage",
    "Stats",
    "Times",
    "Trace",
    "__version__",
]
