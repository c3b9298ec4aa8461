# SPDX-License-Identifier: MIT
"""An unmodified cuda-bindings from PyPI as a second client: it finds the emulator as libcuda.so.1 and runs a kernel."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from emulated import HERE, Emulator

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

CLIENT = """
import ctypes
import numpy as np
from cuda.bindings import driver as cu


def ok(result, *expected):
    assert result[0] == (expected[0] if expected else cu.CUresult.CUDA_SUCCESS), result
    return result[1] if len(result) == 2 else result[1:]


emulator = ctypes.CDLL("libcuda.so.1")
ok(cu.cuInit(0))
assert ok(cu.cuDriverGetVersion()) == 13000
assert ok(cu.cuDeviceGetCount()) == 1
device = ok(cu.cuDeviceGet(0))
assert b"k3emu" in ok(cu.cuDeviceGetName(64, device))
context = ok(cu.cuDevicePrimaryCtxRetain(device))
ok(cu.cuCtxSetCurrent(context))
library = ok(cu.cuLibraryLoadData(b"k3emu kernels", [], [], 0, [], [], 0))
kernel = ok(cu.cuLibraryGetKernel(library, b"good_rms_norm"))
function = ok(cu.cuKernelGetFunction(kernel))
assert list(ok(cu.cuKernelGetParamInfo(kernel, 4))) == [28, 4]

rows, n = 3, 500
rng = np.random.default_rng(0)
x = rng.standard_normal((rows, n)).astype(np.float32)
norm = rng.standard_normal(n).astype(np.float32)
y = np.zeros_like(x)
dx, dn, dy = (ok(cu.cuMemAlloc(a.nbytes)) for a in (x, norm, y))
stream = ok(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))


def run():
    ok(cu.cuMemcpyHtoDAsync(dx, x.ctypes.data, x.nbytes, stream))
    ok(cu.cuMemcpyHtoDAsync(dn, norm.ctypes.data, norm.nbytes, stream))
    values = (int(dx), int(dn), int(dy), n, 1e-6)
    types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_float)
    ok(cu.cuLaunchKernel(function, rows, 1, 1, 256, 1, 1, 4 * n, stream, (values, types), 0))


def check():
    ok(cu.cuMemcpyDtoH(y.ctypes.data, dy, y.nbytes))
    expected = x * norm / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(y, expected, rtol=1e-5)


run()
start, end = (ok(cu.cuEventCreate(0)) for _ in range(2))
ok(cu.cuEventRecord(end, stream))
ok(cu.cuEventSynchronize(end))
check()

ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
run()
assert cu.cuMemAlloc(16)[0] == cu.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
assert cu.cuStreamEndCapture(stream)[0] == cu.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
run()
graph = ok(cu.cuStreamEndCapture(stream))
exec_ = ok(cu.cuGraphInstantiate(graph, 0))
x[:] = rng.standard_normal((rows, n))
ok(cu.cuGraphLaunch(exec_, stream))
ok(cu.cuStreamSynchronize(stream))
check()

emulator.k3emu_fail(b"cuMemAlloc", ctypes.c_uint64(1), 0)
assert cu.cuMemAlloc(16)[0] == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY

for d in (dx, dn, dy):
    ok(cu.cuMemFree(d))
ok(cu.cuGraphExecDestroy(exec_))
ok(cu.cuGraphDestroy(graph))
for event in (start, end):
    ok(cu.cuEventDestroy(event))
ok(cu.cuStreamDestroy(stream))
ok(cu.cuLibraryUnload(library))
ok(cu.cuDevicePrimaryCtxRelease(device))
emulator.k3emu_leaks.restype = ctypes.c_uint64
assert emulator.k3emu_leaks() == 0
emulator.k3emu_report_count.restype = ctypes.c_size_t
assert emulator.k3emu_report_count() == 0
print("done")
"""


@pytest.mark.parametrize("name", ["fast", "check"])
def test_cuda_bindings_runs_a_kernel_and_a_graph(libraries: dict[str, Emulator], name: str) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries[name].path.parent)}
    done = subprocess.run(
        [sys.executable, "-c", CLIENT], env=environment, cwd=HERE, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "done", done.stdout + done.stderr
