"""cuSOLVER's eigendecomposition of many matrices at once, which torch has for matrices of up to 32 columns alone.

Beyond that torch decomposes one matrix after the other, those of up to 512 columns of float32 by Jacobi's method, whose
residuals are a hundred times as large (torch 2.11). The library that torch has loaded is called itself; where it is
none, or an older one than CUDA 12.6's, there is nothing here. On an H100 4 matrices of 256 columns take 0.13 of torch's
time and 40 of them 0.014; a single one of 512 0.27; single ones of 577 and more what they take there.
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
_MOST = 2**31 - 1  # elements of all matrices
# Wider matrices are decomposed at once only from so many on: a call for all takes nine times as long as one for one.
_WIDE, _MANY = 256, 9
_JACOBI = 512  # columns up to which torch decomposes matrices of float32 by Jacobi's method; beyond, few as here
# Bytes that a call for many narrow or wide matrices may take beside them: it wants 6 to 30 times theirs.
_ROOM = 2**26, 2**28
_own = local()  # handles are no two threads'


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor] | None:
    """Decompose matrices on a GPU.

    Args:
        matrices: Symmetric ``[N, d, d]`` of float32 or float64; only the lower triangles are read.

    Returns:
        Eigenvalues ``[N, d]``, ascending, and eigenvectors ``[N, d, d]`` in columns; NaN where it did not converge.
        None: it cannot be done here.
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
    """The library has not done what it was asked to."""


class _Solver:
    """A handle of the library, for one thread and device."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library, self._handle, self._parameters = library, ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cusolverDnCreate", ctypes.byref(self._handle))
        finalize(self, library.cusolverDnDestroy, self._handle).atexit = False
        self._call("cusolverDnCreateParams", ctypes.byref(self._parameters))
        finalize(self, library.cusolverDnDestroyParams, self._parameters).atexit = False
        self._room = ctypes.create_string_buffer(1)

    def eigh(self, matrices: Tensor) -> tuple[Tensor, Tensor]:
        """Return eigenvalues ``[N, d]`` and eigenvectors ``[N, d, d]`` of symmetric matrices ``[N, d, d]``."""
        count, size = matrices.shape[:2]
        scale = matrices.diagonal(dim1=1, dim2=2).abs().amax(1)  # it squares entries, of which 1e-25 would be lost
        scale = torch.where((scale > 0) & (scale < torch.inf), scale, 1)[:, None]
        columns = matrices.contiguous() / scale[:, :, None]  # of which rows are what it calls columns
        values, report = matrices.new_empty(count, size), matrices.new_empty(count, dtype=torch.int32)
        stream = torch.cuda.current_stream(matrices.device).cuda_stream
        self._call("cusolverDnSetStream", self._handle, ctypes.c_void_p(stream))
        most = _ROOM[size > _WIDE]
        fit = count * most // max(most, self._rooms(columns, values)[0])
        step = 1 if size > _WIDE and fit < _MANY else max(1, fit)
        for start in range(0, count, step):
            part = slice(start, start + step)
            self._decompose_(columns[part], values[part], report[part])
        values = torch.where((report == 0)[:, None], values * scale, torch.nan)
        return values, columns.mT

    def _decompose_(self, columns: Tensor, values: Tensor, report: Tensor) -> None:
        """Overwrite matrices by their eigenvectors, and what has room for eigenvalues and for 0 where all went well."""
        on_device, on_host = self._rooms(columns, values)
        room = columns.new_empty(on_device, dtype=torch.uint8)
        if on_host > len(self._room):
            self._room = ctypes.create_string_buffer(on_host)
        rooms = (
            *(_address(room), ctypes.c_size_t(on_device)),
            *(ctypes.cast(self._room, ctypes.c_void_p), ctypes.c_size_t(on_host)),
        )
        what = self._what(columns, values)
        self._call("cusolverDnXsyevBatched", *what, *rooms, _address(report), ctypes.c_int64(len(columns)))

    def _rooms(self, columns: Tensor, values: Tensor) -> tuple[int, int]:
        """Return the bytes that a call takes on the device and on the host."""
        on_device, on_host = ctypes.c_size_t(), ctypes.c_size_t()
        sizes = ctypes.byref(on_device), ctypes.byref(on_host), ctypes.c_int64(len(columns))
        self._call("cusolverDnXsyevBatched_bufferSize", *self._what(columns, values), *sizes)
        return on_device.value, on_host.value

    def _what(self, columns: Tensor, values: Tensor) -> tuple[object, ...]:
        """Return the arguments that tell what is decomposed."""
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
    """Return this thread's handle for a device, made no more than once; None: there can be none."""
    solvers: dict[torch.device, _Solver | None] = _own.__dict__.setdefault("solvers", {})
    if device not in solvers:
        solvers[device] = None
        library = _library(device)
        solvers[device] = None if library is None else _Solver(library)
    return solvers[device]


@cache
def _library(device: torch.device) -> ctypes.CDLL | None:
    """Return the library that torch has loaded, if it is one that can do it."""
    name = _NAMES.get((torch.version.cuda or "").split(".")[0])
    if name is None:
        return None
    torch.linalg.eigh(torch.eye(2, device=device))  # torch loads it no sooner than it must
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return None
    return library if hasattr(library, "cusolverDnXsyevBatched") else None
