# SPDX-License-Identifier: MIT
"""One model over several processes, of one machine or many: each has some of the layers, and MPI carries what passes.

Needs the extra ``k3session[mpi]`` and an MPI library.  docs/pipeline.md shows how to start it.
"""

from k3session.pipeline.model import PipelineModel
from k3session.pipeline.mpi_line import PipelineError
from k3session.pipeline.place import serve
from k3session.pipeline.session import PipelineSession

__all__ = ["PipelineError", "PipelineModel", "PipelineSession", "serve"]
