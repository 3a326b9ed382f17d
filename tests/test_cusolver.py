"""How cuSOLVER is called, by a stand-in that does on the host's memory what the library does on a GPU's.

What the library itself returns is in ``tests/cuda/test_cusolver.py``.
"""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from natgrad import linalg
from natgrad.linalg import cusolver

DTYPES = {0: torch.float32, 1: torch.float64}


def tensor_at(address, shape, dtype):
    kind = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double, torch.int32: ctypes.c_int}[dtype]
    count = torch.Size(shape).numel()
    return torch.frombuffer((kind * count).from_address(address.value), dtype=dtype).view(shape)


class Library:
    """Column-major matrices, of which it reads the upper triangle and writes eigenvectors in columns."""

    def __init__(self, *, room=8, fails=(), refuses=None):
        self.counts, self.live = [], 0
        self._room, self._fails, self._refuses = room, fails, refuses

    def cusolverDnCreate(self, handle):  # noqa: N802
        self.live += 1
        return int(self._refuses == "handle")

    cusolverDnCreateParams = cusolverDnCreate  # noqa: N815

    def cusolverDnDestroy(self, handle):  # noqa: N802
        self.live -= 1

    cusolverDnDestroyParams = cusolverDnDestroy  # noqa: N815

    def cusolverDnSetStream(self, handle, stream):  # noqa: N802
        return 0

    def cusolverDnXsyevBatched_bufferSize(  # noqa: N802
        self, handle, params, mode, half, size, kind, a, lead, kind_of_w, w, work, on_device, on_host, count
    ):
        on_device._obj.value, on_host._obj.value = count.value * self._room, 16
        return 0

    def cusolverDnXsyevBatched(  # noqa: N802
        self,
        handle,
        params,
        mode,
        half,
        size,
        kind,
        a,
        lead,
        kind_of_w,
        w,
        work,
        room,
        n_room,
        host,
        n_host,
        info,
        count,
    ):
        assert (mode.value, half.value, lead.value) == (1, 1, size.value)
        assert kind.value == kind_of_w.value == work.value
        assert (n_room.value, n_host.value) == (count.value * self._room, 16)
        if self._refuses == "call":
            return 7
        n, dtype = size.value, DTYPES[kind.value]
        columns = tensor_at(a, (count.value, n, n), dtype).mT
        values, vectors = torch.linalg.eigh(columns.clone(), UPLO="U")
        columns.copy_(vectors)
        tensor_at(w, (count.value, n), dtype).copy_(values)
        report = tensor_at(info, (count.value,), torch.int32)
        for block in range(count.value):
            report[block] = int(sum(self.counts) + block in self._fails)
        self.counts.append(count.value)
        return 0


@pytest.fixture
def solve(monkeypatch):
    """Decompose by a stand-in."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))

    def decompose(matrices, **options):
        library = Library(**options)
        solver = cusolver._Solver(library)
        found = solver.eigh(matrices)
        assert library.live == 2
        del solver
        assert library.live == 0
        return *found, library.counts

    return decompose


def covariances(count, size, dtype=torch.float64, scale=1.0):
    torch.manual_seed(size)
    rows = torch.randn(count, 2 * size, size, dtype=torch.float64)
    return (rows.mT @ rows * scale).to(dtype)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e20])
def test_lower_triangles_are_decomposed_into_columns(solve, dtype, scale):
    whole = covariances(3, 7, dtype, scale)
    lower = whole.tril() + torch.full_like(whole, torch.nan).triu(1)
    before = lower.clone()
    values, vectors, counts = solve(lower)
    assert counts == [3]
    assert torch.equal(lower.tril(), before.tril())
    tolerance = 50 * torch.finfo(dtype).eps
    rebuilt = (vectors.double() * values.double()[:, None]) @ vectors.double().mT
    torch.testing.assert_close(rebuilt / scale, whole.double() / scale, rtol=0, atol=tolerance * 40)
    assert solve(whole.mT.contiguous().mT)[0].equal(solve(whole)[0])  # in whatever order in memory
    assert not solve(torch.zeros(2, 4, 4, dtype=dtype))[0].any()


@pytest.mark.cpu
def test_many_take_the_room_that_they_may_and_few_wide_ones_a_call_each(solve, monkeypatch):
    monkeypatch.setattr(cusolver, "_WIDE", 8)
    monkeypatch.setattr(cusolver, "_WORKSPACE", (40, 90))
    for count, size, counts in ((4, 8, [4]), (12, 8, [4, 4, 4]), (8, 9, [1] * 8), (9, 9, [9]), (25, 9, [9, 9, 7])):
        matrices = covariances(count, size)
        values, vectors, found = solve(matrices, room=10)
        assert found == counts
        torch.testing.assert_close((vectors * values[:, None]) @ vectors.mT, matrices)


@pytest.mark.cpu
def test_what_does_not_converge_is_told(solve):
    values, _, _ = solve(covariances(4, 5), fails=(1, 2))
    assert values.isnan().all(1).tolist() == [False, True, True, False]


@pytest.mark.cpu
@pytest.mark.parametrize("refuses", ["handle", "call"])
def test_what_is_refused_is_said(solve, refuses):
    with pytest.raises(cusolver._RefusedError, match="status"):
        solve(covariances(2, 5), refuses=refuses)


@pytest.mark.parametrize("matrices", [torch.eye(3)[None], torch.eye(3, dtype=torch.float16)[None], torch.ones(0, 2, 2)])
@pytest.mark.cpu
def test_there_is_nothing_for_other_devices_and_dtypes(matrices):
    assert cusolver.eigh(matrices) is None
    assert linalg.eigh(matrices.double())[2].all()
