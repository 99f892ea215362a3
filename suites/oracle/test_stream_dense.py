"""Products with dense weights: every type and layout, tile by tile, shared by workers."""

from __future__ import annotations

import threading
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from harness.oracle import OracleModel, matrix, workers
from harness.oracle.matrix import (
    DenseMatrix,
    Projection,
    ResidentMatrix,
    multiply_tile,
    product,
    widen_into,
)
from harness.oracle.planner import Budget

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def saved(path: Path, weight: np.ndarray, *, tokens: int, turned: bool) -> Path:
    """A graph of x W^T: W [N, K] as Gemm takes it, or [K, N] as MatMul does; x is of W's type."""
    depth = weight.shape[1]
    node = (
        helper.make_node("MatMul", ["x", "w"], ["y"])
        if turned
        else helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)
    )
    elem = helper.np_dtype_to_tensor_dtype(weight.dtype)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", elem, [tokens, depth])],
        [helper.make_tensor_value_info("y", elem, None)],
        [numpy_helper.from_array(np.ascontiguousarray(weight.T) if turned else weight, "w")],
    )
    opsets = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


@pytest.mark.parametrize("turned", [False, True], ids=["[N, K]", "[K, N]"])
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5])
def test_streamed_products_are_kept_products(
    dtype: str, precision: Any, turned: bool, tokens: int, tmp_path: Path
) -> None:
    """A weight of more than one tile gives x W^T in the precision, kept or streamed."""
    rng = np.random.default_rng(2)
    weight = rng.standard_normal((1100, 300)).astype(DTYPES[dtype])
    x = rng.standard_normal((tokens, 300)).astype(DTYPES[dtype])
    path = saved(tmp_path / "m.onnx", weight, tokens=tokens, turned=turned)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    bound = {"float32": 1e-5, "float64": 1e-13}[precision] * np.abs(expected).max()
    for limit in (0, 1 << 30):
        y = OracleModel.load(path, precision=precision, resident_limit=limit).run({"x": x}, ["y"])["y"]
        assert y.dtype == precision
        assert np.abs(y - expected).max() <= bound


@pytest.mark.parametrize("turned", [False, True], ids=["[N, K]", "[K, N]"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_narrow_weight_beyond_the_limit_is_never_whole(dtype: str, turned: bool, tmp_path: Path) -> None:
    """A product with 6 M weights, 24 MB in fp32, takes a tile of a megabyte a worker and little more."""
    rows, depth, tokens = 4096, 1500, 4
    weight = np.ones((rows, depth), DTYPES[dtype])
    x = np.ones((tokens, depth), DTYPES[dtype])
    model = OracleModel.load(
        saved(tmp_path / "m.onnx", weight, tokens=tokens, turned=turned), resident_limit=0, threads=2
    )
    model.run({"x": x}, ["y"])
    tracemalloc.start()
    y = model.run({"x": x}, ["y"])["y"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (y == depth).all()
    tile = matrix._NARROW_ROWS * matrix._NARROW_DEPTH * 4
    # A worker has the tile, and on the way to it the same in int32 and half of it in int16.
    assert peak < 2 * 3 * tile + (1 << 18) < rows * depth * 4 / 2


@pytest.mark.parametrize("turned", [False, True], ids=["[N, K]", "[K, N]"])
@pytest.mark.parametrize("tokens", [1, 4, 21, 100])
def test_a_weight_between_words_is_never_whole_either(tokens: int, turned: bool, tmp_path: Path) -> None:
    """Whatever byte of its file it starts at, its products are the same, and it is not copied for them."""
    rows, depth = 4096, 1500
    weight = np.random.default_rng(3).integers(-8, 8, (rows, depth)).astype(np.float32)
    x = np.random.default_rng(4).integers(-8, 8, (tokens, depth)).astype(np.float32)
    expected = x.astype(np.int64) @ weight.astype(np.int64).T
    path = saved(tmp_path / "m.onnx", weight, tokens=tokens, turned=turned)
    model = onnx.load(path)
    (tensor,) = model.graph.initializer
    data = numpy_helper.to_array(tensor).tobytes()
    for start in range(4):
        (tmp_path / "w").write_bytes(b"\0" * start + data)
        tensor.ClearField("raw_data")
        tensor.ClearField("external_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in {"location": "w", "offset": str(start)}.items():
            tensor.external_data.add(key=key, value=value)
        onnx.save(model, tmp_path / "moved.onnx")
        loaded = OracleModel.load(tmp_path / "moved.onnx", resident_limit=0, threads=2)
        loaded.run({"x": x}, ["y"])
        tracemalloc.start()
        y = loaded.run({"x": x}, ["y"])["y"]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        np.testing.assert_array_equal(y, expected)
        assert peak < rows * depth * 4 / 2, start


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_depends_on_the_number_of_workers(dtype: str, tokens: int) -> None:
    """Tiles are cut alike whoever multiplies them, so that a report can be repeated on another machine."""
    rng = np.random.default_rng(4)
    weight = rng.standard_normal((6000, 3000)).astype(DTYPES[dtype])
    x = rng.standard_normal((tokens, 3000)).astype(np.float32)
    dense = DenseMatrix(weight, np.dtype(np.float32))
    results = []
    for count in (1, 2, 3):
        with workers.workers(count):
            results.append(product(dense, x))
    assert tokens * weight.size >= matrix._SHARED_FROM
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


@given(
    rows=st.integers(1, 300),
    depth=st.sampled_from([1, 31, 64, 641, 1280, 1283, 1920]),
    tokens=st.integers(1, 60),
    order=st.sampled_from("CF"),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_tiles_of_any_size_are_multiplied_whole(
    rows: int, depth: int, tokens: int, order: Any, dtype: Any
) -> None:
    """Whether or not a tile falls into small products, and rows are left over: whole numbers are exact."""
    rng = np.random.default_rng(rows * depth + tokens)
    tile = np.asarray(rng.integers(-8, 8, (rows, depth)), dtype, order=order)
    columns = rng.integers(-8, 8, (depth, tokens)).astype(dtype)
    out = np.full((rows, tokens), np.nan, dtype)
    multiply_tile(tile, columns, out)
    np.testing.assert_array_equal(out, tile.astype(np.int64) @ columns.astype(np.int64))


@pytest.mark.parametrize("shape", [(64, 5120), (96, 576), (300, 1920)])
@pytest.mark.parametrize("tokens", [8, 24, 48])
def test_few_tokens_are_multiplied_in_small_products(
    shape: tuple[int, int], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No product but that of the rows left over is larger than what OpenBLAS multiplies where it lies."""
    multiplied: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    matmul = np.matmul

    def noted(a: np.ndarray, b: np.ndarray, **options: Any) -> np.ndarray:
        multiplied.append((a.shape, b.shape))
        result: np.ndarray = matmul(a, b, **options)
        return result

    monkeypatch.setattr(matrix.np, "matmul", noted)
    out = np.empty((shape[0], tokens), np.float32)
    multiply_tile(np.ones(shape, np.float32), np.ones((shape[1], tokens), np.float32), out)
    assert (out == shape[1]).all()
    (first, columns), *rest = multiplied
    assert first[-2] * first[-1] * columns[-1] <= 100**3
    assert len(rest) <= 1
    left = shape[0] - first[0] * first[-2]
    assert left < first[-2]


@given(bits=st.lists(st.integers(0, 65535), min_size=300, max_size=300), finite=st.booleans())
def test_halves_widen_exactly(bits: list[int], finite: bool) -> None:
    """Every half, subnormals and signed zeros included, becomes the float of the same value, to the bit."""
    halves = np.array(bits, np.uint16).view(np.float16)
    if finite:
        halves = np.where(np.isfinite(halves), halves, np.float16(1))
    wide = np.empty(halves.shape, np.float32)
    widen_into(halves, wide)
    expected = halves.astype(np.float32)
    np.testing.assert_array_equal(wide.view(np.uint32), expected.view(np.uint32))


def test_every_half_widens_exactly() -> None:
    """All 63,488 finite halves at once, and into float64 too."""
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    for dtype in (np.float32, np.float64):
        wide = np.empty(halves.shape, dtype)
        widen_into(halves, wide)
        np.testing.assert_array_equal(wide, halves.astype(dtype))
        np.testing.assert_array_equal(np.signbit(wide), np.signbit(halves))


def test_weights_stay_together_or_not_at_all() -> None:
    """Two weights that fit singly but not together are both streamed; what is reserved counts as well."""

    def kept(limit: int, reserved: int) -> list[bool]:
        budget = Budget(limit)
        sources = [DenseMatrix(np.ones((8, 8), np.float16), np.dtype(np.float32)) for _ in range(2)]
        residents = [ResidentMatrix(source, budget) for source in sources]
        assert budget.reserve(reserved)
        return [resident.now() is not source for resident, source in zip(residents, sources, strict=True)]

    assert kept(512, 0) == [True, True]
    assert kept(511, 0) == [False, False]
    assert kept(600, 100) == [False, False]


def test_weights_that_lie_ready_count_for_nothing() -> None:
    """A float32 weight is used as it is mapped: it neither claims memory nor is copied."""
    budget = Budget(0)
    source = DenseMatrix(np.ones((8, 8), np.float32), np.dtype(np.float32))
    assert ResidentMatrix(source, budget).now() is source
    assert budget.claim(0)()


def test_features_that_do_not_match_are_refused() -> None:
    """[2, 6] tokens do not quietly become [3, 4] ones for a weight of depth 4."""
    weight = DenseMatrix(np.ones((5, 4), np.float32), np.dtype(np.float32))
    with pytest.raises(ValueError, match="6 features meet a weight of 4"):
        Projection(ResidentMatrix(weight, Budget(0)))(np.ones((2, 6), np.float32))


# --- workers


@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_job_is_done_once(count: int) -> None:
    """All jobs, whoever does them; none is shared again inside a helper."""
    done: list[int] = []
    inner: list[int] = []

    def work(claims: workers.Claims) -> None:
        for job in claims:
            done.append(job)
            if threading.current_thread() is not threading.main_thread():
                inner.append(workers.worker_count())

    with workers.workers(count):
        workers.share(200, work)
    assert sorted(done) == list(range(200))
    assert set(inner) <= {1}


class StoppedOnRelease:
    """A lock behind whose first release another worker finds nothing left, and stops all."""

    claims: workers.Claims | None = None

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        claims, self.claims = self.claims, None
        if claims is not None:
            claims.stop()


def test_a_claimed_job_is_done_whenever_the_others_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that was claimed and left is memory that nobody wrote, and so are all logits behind it.

    A worker that is not scheduled for a while stands just there: it has its number, and the others, who
    find nothing left, are done.
    """
    lock = StoppedOnRelease()
    monkeypatch.setattr(workers.threading, "Lock", lambda: lock)
    claims = lock.claims = workers.Claims(5)
    assert list(claims) == [0]


def test_settings_of_the_caller_hold_in_every_worker() -> None:
    """`np.errstate` is one: a helper that warned of an overflow would fail a strict suite."""
    seen: list[str] = []

    def work(claims: workers.Claims) -> None:
        seen.append(np.geterr()["over"])
        for _ in claims:
            pass

    with np.errstate(over="raise"), workers.workers(2):
        workers.share(50, work)
    assert seen == ["raise"] * 2


@pytest.mark.parametrize("failing", [0, 99])
def test_an_error_reaches_the_caller(failing: int) -> None:
    """Whichever worker meets it; and the next product works."""

    def work(claims: workers.Claims) -> None:
        for job in claims:
            if job == failing:
                raise ValueError("no such tile")

    with workers.workers(2):
        with pytest.raises(ValueError, match="no such tile"):
            workers.share(100, work)
        done: list[int] = []
        workers.share(10, lambda claims: done.extend(claims))
    assert sorted(done) == list(range(10))


def test_results_are_those_of_one_thread_through_a_model(tmp_path: Path) -> None:
    """`threads` of a model changes no bit of what it gives."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((5000, 2000)).astype(np.float32)
    path = saved(tmp_path / "m.onnx", weight, tokens=3, turned=True)
    x = rng.standard_normal((3, 2000)).astype(np.float32)
    one, two, all_of_them = (OracleModel.load(path, threads=n).run({"x": x}, ["y"])["y"] for n in (1, 2, 0))
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(one, all_of_them)


def test_narrow_weights_of_a_graph_are_not_widened_by_planning(tmp_path: Path) -> None:
    """Loading 12 MB of halves beyond the limit allocates a fraction of them."""
    weight = np.ones((4096, 1500), np.float16)
    path = saved(tmp_path / "m.onnx", weight, tokens=1, turned=True)
    OracleModel.load(path, resident_limit=0)
    tracemalloc.start()
    OracleModel.load(path, resident_limit=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < weight.nbytes / 10
