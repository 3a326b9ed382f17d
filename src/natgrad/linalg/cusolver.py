"""cuSOLVER's batched eigendecomposition, which torch only uses for matrices of up to 32 columns.

For larger matrices torch decomposes one after the other, float32 up to 512 columns by Jacobi's method, whose residuals
are a hundred times as large (torch 2.11). This module calls the library that torch has loaded, which must be that of
CUDA 12.6 or later. On an H100 4 matrices of 256 columns take 0.13 of torch's time, 40 of them 0.014, a single matrix of
512 columns 0.27, and a single one of 577 or more the same time.
"""

from __future__ import annotations

import ctypes
from functools import cache
from threading import local
from weakref import finalize

import torch
from torch import Tensor

_NAMES = {"12": "libcusolver.so.11", "13": "libcusolver.so.12"}  # by the version of CUDA
_WITH_VECTORS, _UPPER = 1, 1  # CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_UPPER
_KINDS = {torch.float32: 0, torch.float64: 1}  # CUDA_R_32F, CUDA_R_64F
_MOST = 2**31 - 1  # the largest number of elements of a batch
# Matrices with more than _WIDE columns are batched only from _MANY on: a batched call takes nine times as long as a
# call for a single matrix.
_WIDE, _MANY = 256, 9
_JACOBI = 512  # up to this number of columns torch uses Jacobi's method for float32
# Bytes of workspace allowed in a call for narrow and for wide matrices; it needs 6 to 30 times their size.
_WORKSPACE = 2**26, 2**28
_thread = local()  # a handle must not be used by two threads


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor] | None:
    """Decompose symmetric ``matrices [N, d, d]`` on a GPU. Only the lower triangles are read.

    Returns:
        Eigenvalues ``[N, d]``, ascending, and eigenvectors ``[N, d, d]`` in columns; NaN where it did not converge.
        None if torch should decompose them.
    """
    if matrices.device.type != "cuda" or matrices.dtype not in _KINDS or not 0 < matrices.numel() <= _MOST:
        return None
    if matrices.shape[-1] > _JACOBI and len(matrices) < _MANY:
        return None
    try:
        with torch.cuda.device(matrices.device):
            solver = _solver(matrices.device)
            return None if solver is None else solver.eigh(matrices)
    except (_RefusedError, torch.OutOfMemoryError):
        return None


class _RefusedError(Exception):
    """A call of the library failed."""


class _Solver:
    """A cuSOLVER handle for one thread and device."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library, self._handle, self._parameters = library, ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cusolverDnCreate", ctypes.byref(self._handle))
        finalize(self, library.cusolverDnDestroy, self._handle).atexit = False
        self._call("cusolverDnCreateParams", ctypes.byref(self._parameters))
        finalize(self, library.cusolverDnDestroyParams, self._parameters).atexit = False
        self._host_workspace = ctypes.create_string_buffer(1)

    def eigh(self, matrices: Tensor) -> tuple[Tensor, Tensor]:
        """Return eigenvalues ``[N, d]`` and eigenvectors ``[N, d, d]`` of symmetric matrices ``[N, d, d]``."""
        count, size = matrices.shape[:2]
        scale = matrices.diagonal(dim1=1, dim2=2).abs().amax(1)  # the library squares entries: 1e-25 would underflow
        scale = torch.where((scale > 0) & (scale < torch.inf), scale, 1)[:, None]
        columns = matrices.contiguous() / scale[:, :, None]  # column-major for the library
        values, report = matrices.new_empty(count, size), matrices.new_empty(count, dtype=torch.int32)
        stream = torch.cuda.current_stream(matrices.device).cuda_stream
        self._call("cusolverDnSetStream", self._handle, ctypes.c_void_p(stream))
        most = _WORKSPACE[size > _WIDE]
        fit = count * most // max(most, self._workspace_sizes(columns, values)[0])
        step = 1 if size > _WIDE and fit < _MANY else max(1, fit)
        for start in range(0, count, step):
            part = slice(start, start + step)
            self._decompose_(columns[part], values[part], report[part])
        values = torch.where((report == 0)[:, None], values * scale, torch.nan)
        return values, columns.mT

    def _decompose_(self, columns: Tensor, values: Tensor, report: Tensor) -> None:
        """Overwrite `columns` by the eigenvectors, `values` by the eigenvalues, and `report` by 0 for success."""
        on_device, on_host = self._workspace_sizes(columns, values)
        workspace = columns.new_empty(on_device, dtype=torch.uint8)
        if on_host > len(self._host_workspace):
            self._host_workspace = ctypes.create_string_buffer(on_host)
        workspaces = (
            *(_address(workspace), ctypes.c_size_t(on_device)),
            *(ctypes.cast(self._host_workspace, ctypes.c_void_p), ctypes.c_size_t(on_host)),
        )
        problem = self._problem(columns, values)
        self._call("cusolverDnXsyevBatched", *problem, *workspaces, _address(report), ctypes.c_int64(len(columns)))

    def _workspace_sizes(self, columns: Tensor, values: Tensor) -> tuple[int, int]:
        """Return the bytes of workspace on the device and on the host."""
        on_device, on_host = ctypes.c_size_t(), ctypes.c_size_t()
        sizes = ctypes.byref(on_device), ctypes.byref(on_host), ctypes.c_int64(len(columns))
        self._call("cusolverDnXsyevBatched_bufferSize", *self._problem(columns, values), *sizes)
        return on_device.value, on_host.value

    def _problem(self, columns: Tensor, values: Tensor) -> tuple[object, ...]:
        """Return the arguments that describe the matrices."""
        size, kind = ctypes.c_int64(columns.shape[-1]), ctypes.c_int(_KINDS[columns.dtype])
        return (
            *(self._handle, self._parameters, ctypes.c_int(_WITH_VECTORS), ctypes.c_int(_UPPER), size),
            *(kind, _address(columns), size, kind, _address(values), kind),
        )

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise _RefusedError(f"{name}: status {status}")


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _solver(device: torch.device) -> _Solver | None:
    """Return this thread's handle for a device, or None if the library is not available."""
    solvers: dict[torch.device, _Solver | None] = _thread.__dict__.setdefault("solvers", {})
    if device not in solvers:
        solvers[device] = None
        library = _library(device)
        solvers[device] = None if library is None else _Solver(library)
    return solvers[device]


@cache
def _library(device: torch.device) -> ctypes.CDLL | None:
    """Return the library that torch has loaded, if it has the batched decomposition."""
    name = _NAMES.get((torch.version.cuda or "").split(".")[0])
    if name is None:
        return None
    torch.linalg.eigh(torch.eye(2, device=device))  # torch loads the library at first use
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return None
    return library if hasattr(library, "cusolverDnXsyevBatched") else None
