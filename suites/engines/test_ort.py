"""What is particular to ONNX Runtime: options, placement, and never the CPU when CUDA was asked for."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from fixtures.decoders import save_graph
from harness.engines import ort_runtime
from harness.engines.ort import CPU_ENGINE, CUDA_ENGINE
from harness.engines.ort_placement import require_on_device
from harness.engines.ort_runtime import captured_stderr, cpu_availability, cuda_availability
from harness.errors import EngineUnavailableError, InputError, InvalidRunError

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two products, an activation, and an operator of another domain."""
    real = TensorProto.FLOAT
    return save_graph(
        tmp_path_factory.mktemp("ort") / "model.onnx",
        [
            helper.make_node("MatMul", ["x", "w"], ["a"]),
            helper.make_node("MatMul", ["a", "w"], ["b"]),
            helper.make_node("Relu", ["b"], ["c"]),
            helper.make_node("QuickGelu", ["c"], ["y"], domain="com.microsoft"),
        ],
        [helper.make_tensor_value_info("x", real, ["n", 2])],
        [helper.make_tensor_value_info("y", real, ["n", 2])],
        {"w": np.eye(2, dtype=np.float32)},
    )


@pytest.fixture(scope="module")
def really_on_cuda(model: Path) -> bool:
    """Whether ONNX Runtime, asked for CUDA in the plainest way, ends up there on this machine."""
    with captured_stderr():
        onnxruntime.preload_dlls()
        session = onnxruntime.InferenceSession(str(model), providers=[CUDA])
    return session.get_providers()[0] == CUDA


def test_placement_counts_the_nodes(model: Path) -> None:
    """Without optimisation the placement holds exactly the nodes of the file."""
    info = CPU_ENGINE.open(model, {"opt": "disable"}).info

    assert info.placement == {
        "providers": {CPU: {"MatMul": 2, "Relu": 1, "com.microsoft.QuickGelu": 1}},
    }


def test_settings_are_reported_as_they_run(model: Path) -> None:
    """Requested options and pinned ones stand side by side."""
    info = CPU_ENGINE.open(model, {"opt": "basic", "threads": 1}).info

    assert dict(info.settings) == {
        "threads": 1,
        "opt": "basic",
        "inter_op_threads": 1,
        "deterministic_compute": False,
    }


@pytest.mark.parametrize("opt", ["all", "extended", "basic", "disable"])
def test_the_optimisation_level_reaches_the_runtime(model: Path, opt: str) -> None:
    """Each level is ONNX Runtime's own; an ignored option would leave the default."""
    session: Any = CPU_ENGINE.open(model, {"opt": opt, "threads": 1})
    options = session._session.get_session_options()

    expected = {
        "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
        "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
        "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
        "disable": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    }[opt]
    assert options.graph_optimization_level == expected
    assert options.intra_op_num_threads == 1


@pytest.mark.parametrize(("asked", "expected"), [("0", False), ("1", True)])
def test_deterministic_compute_reaches_the_runtime(model: Path, asked: str, expected: bool) -> None:
    """And the report."""
    session: Any = CPU_ENGINE.open(model, {"deterministic": asked, "threads": 1})
    assert session._session.get_session_options().use_deterministic_compute is expected
    assert session.info.settings["deterministic_compute"] is expected


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        (CPU_ENGINE, {"threads": -1}, "threads=-1 must be a whole number"),
        (CPU_ENGINE, {"threads": "many"}, "threads=many"),
        (CPU_ENGINE, {"threads": True}, "threads=True"),
        (CPU_ENGINE, {"opt": "fast"}, "opt=fast must be one of all, extended, basic, disable"),
        (CUDA_ENGINE, {"tf32": 2}, "tf32=2 must be one of 0, 1"),
        (CUDA_ENGINE, {"device": "first"}, "device=first"),
    ],
)
def test_an_option_with_a_wrong_value_is_bad_input(
    model: Path, engine: Any, options: dict[str, Any], message: str
) -> None:
    """Said before anything is loaded, also where the engine is not usable."""
    with pytest.raises(InputError, match=message):
        engine.open(model, options)


def test_cuda_is_usable_only_where_it_computes(
    really_on_cuda: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Compiled in is not usable. The answer has a reason and a way out, and asking writes nothing."""
    found = CUDA_ENGINE.availability()

    assert found.usable == really_on_cuda
    assert (found.reason is None) == (found.next_action is None) == really_on_cuda
    if ctypes.util.find_library("cuda") is None and sys.platform != "win32":
        assert "no NVIDIA driver" in str(found.reason)
    assert capfd.readouterr() == ("", "")


def test_a_driver_without_its_libraries_is_found_out(
    really_on_cuda: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where the driver claims a device, a session still has to open there; its noise becomes the reason."""
    monkeypatch.setattr(ort_runtime, "_driver_problem", lambda device: None)
    ort_runtime._session_problem.cache_clear()

    found = cuda_availability()

    assert found.usable == really_on_cuda
    assert really_on_cuda or "a CUDA session does not open: " in str(found.reason)
    assert capfd.readouterr() == ("", "")


def test_cuda_never_runs_on_the_cpu(
    model: Path, really_on_cuda: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Opening either computes on CUDA or fails with the reason; there is no third way."""
    if really_on_cuda:
        placement = CUDA_ENGINE.open(model, {"opt": "disable"}).info.placement
        assert placement is not None
        assert placement["providers"][CUDA]["MatMul"] == 2
        return
    with pytest.raises(EngineUnavailableError, match="ort-cuda is not usable here"):
        CUDA_ENGINE.open(model, {})
    assert capfd.readouterr() == ("", "")


def test_a_session_that_fell_back_is_an_invalid_run(
    model: Path, really_on_cuda: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Even if every check before it were fooled, the open session is asked where it runs."""
    monkeypatch.setattr("harness.engines.ort.cuda_availability", lambda device: cpu_availability())

    if really_on_cuda:
        CUDA_ENGINE.open(model, {})
        return
    with pytest.raises(InvalidRunError, match=f"{CUDA}.*runs on {CPU}"):
        CUDA_ENGINE.open(model, {})
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "elsewhere", [{}, {"Shape": 4, "Gather": 4, "Concat": 2}, {"Cast": 1, "Unsqueeze": 9, "Range": 1}]
)
def test_shape_arithmetic_may_run_on_the_cpu(elsewhere: dict[str, int]) -> None:
    """ONNX Runtime moves it there on purpose."""
    require_on_device(CUDA, {"providers": {CUDA: {"MatMul": 12}, CPU: elsewhere}})


@pytest.mark.parametrize(
    ("placement", "named"),
    [
        ({CUDA: {"MatMul": 12}, CPU: {"Shape": 1, "Softmax": 3}}, "3 Softmax on CPUExecutionProvider"),
        ({CUDA: {"MatMul": 12}, CPU: {"com.microsoft.MatMulNBits": 1}}, "com.microsoft.MatMulNBits"),
        ({CPU: {"Shape": 1}}, "no node ran there"),
        ({}, "no node ran there"),
    ],
)
def test_real_work_on_the_cpu_is_an_invalid_run(placement: dict[str, dict[str, int]], named: str) -> None:
    """What ran elsewhere is listed; a device that did nothing proves nothing."""
    with pytest.raises(InvalidRunError, match=named) as caught:
        require_on_device(CUDA, {"providers": placement})
    assert caught.value.exit_code == 6


@pytest.fixture(scope="module")
def plugin() -> str:
    """The path of a provider library that needs nothing but a CPU."""
    try:
        import nxrt_ep_cpu
    except ImportError:
        pytest.skip("the package nxrt-ep-cpu is not installed: `pip install --pre --no-deps nxrt-ep-cpu`.")
    return str(nxrt_ep_cpu.get_library_path())


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A product and an activation, which any provider has."""
    real = TensorProto.FLOAT
    return save_graph(
        tmp_path / "model.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Relu", ["a"], ["y"])],
        [helper.make_tensor_value_info("x", real, ["n", 2])],
        [helper.make_tensor_value_info("y", real, ["n", 2])],
        {"w": np.array([[1, -2], [3, -4]], np.float32)},
    )


def test_a_provider_of_a_library_runs_and_is_reported(plugin: str, plain: Path) -> None:
    """Every node is there, the settings name it with its version, and a second session opens as well."""
    for _ in range(2):
        session = CPU_ENGINE.open(plain, {"provider": "cpu_ep", "library": plugin})
        assert session.info.placement == {"providers": {"cpu_ep": {"MatMul": 1, "Relu": 1}}}
        assert session.info.settings["provider"] == "cpu_ep"
        assert session.info.settings["provider_version"]
        placed = session.place(np.array([[1, 1]], np.float32))
        assert session.copy_out(session.run({"x": placed}, ["y"])["y"]).tolist() == [[4.0, 0.0]]


def test_a_provider_that_leaves_work_to_another_is_an_invalid_run(plugin: str, tmp_path: Path) -> None:
    """It has no kernel for a determinant: what ran on the built-in provider is named."""
    real = TensorProto.FLOAT
    model = save_graph(
        tmp_path / "model.onnx",
        [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Det", ["a"], ["y"])],
        [helper.make_tensor_value_info("x", real, ["n", 2, 2])],
        [helper.make_tensor_value_info("y", real, ["n"])],
    )
    with pytest.raises(InvalidRunError, match=r"cpu_ep was asked for, .*1 Det on CPUExecutionProvider"):
        CPU_ENGINE.open(model, {"provider": "cpu_ep", "library": plugin})


def test_a_provider_that_a_library_lacks_names_those_it_has(plugin: str, plain: Path) -> None:
    """Also where none was named: nothing is guessed."""
    for provider in ("gpu_ep", ""):
        with pytest.raises(InputError, match=r"It offers: cpu_ep\."):
            CPU_ENGINE.open(plain, {"provider": provider, "library": plugin})


@pytest.mark.parametrize("what", ["missing", "no library", "no provider library"])
def test_what_is_no_provider_library_is_bad_input(what: str, plain: Path, tmp_path: Path) -> None:
    """A file that is not there, one that does not load, and a library of something else."""
    library: Any = tmp_path / "library.so"
    if what == "no library":
        library.write_text("text", encoding="utf-8")
    elif what == "no provider library":
        library = ctypes.util.find_library("m")
        library = next(Path("/usr/lib").glob(f"*/{library}"), None) if library else None
        if library is None:
            pytest.skip("the C library of mathematics is not where it was looked for")
    with pytest.raises(InputError, match="no library of an execution provider"):
        CPU_ENGINE.open(plain, {"provider": "any", "library": str(library)})


def test_a_provider_without_its_library_is_bad_input(plain: Path) -> None:
    """The message has the form in which to write it."""
    with pytest.raises(InputError, match="ort-cpu:provider=cpu_ep,library=PATH"):
        CPU_ENGINE.open(plain, {"provider": "cpu_ep"})


def install(folder: Path, name: str, version: str, *files: str) -> None:
    """What pip leaves of a distribution beside its files."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8"
    )
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files), encoding="utf-8")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which distributions are found; the modules are where they were."""
    monkeypatch.setattr(
        ort_runtime.metadata,
        "distribution",
        lambda name: (
            next(iter(metadata.distributions(name=name, path=[str(tmp_path)])), None) or absent(name)
        ),
    )
    return tmp_path


def absent(name: str) -> Any:
    """As `importlib.metadata` says it."""
    raise metadata.PackageNotFoundError(name)


def test_a_provider_in_a_library_of_its_own_is_no_second_runtime(site: Path) -> None:
    """What counts is who owns the files of the module, whatever a distribution is called."""
    install(site, "onnxruntime-gpu", "1.31.1", "onnxruntime/__init__.py", "onnxruntime/capi/x.so")
    install(site, "onnxruntime-qnn", "2.7.0", "onnxruntime_qnn/__init__.py", "onnxruntime_qnn/qnn.so")

    assert ort_runtime.installed_distributions() == {"onnxruntime-gpu": "1.31.1"}
    assert CPU_ENGINE.availability().usable


def test_a_distribution_without_a_record_may_own_the_files(site: Path) -> None:
    """It is taken for one that does, so that nothing runs on files of two."""
    install(site, "onnxruntime-gpu", "1.31.1", "onnxruntime/__init__.py")
    install(site, "onnxruntime-rocm", "1.22.2", "onnxruntime/__init__.py")
    (site / "onnxruntime_rocm-1.22.2.dist-info/RECORD").unlink()

    assert set(ort_runtime.installed_distributions()) == {"onnxruntime-gpu", "onnxruntime-rocm"}


def test_two_distributions_together_are_not_usable(site: Path, model: Path) -> None:
    """They overwrite each other's files, so neither can be trusted; the fix is the next action."""
    for name, version in (("onnxruntime", "1.32.0"), ("onnxruntime-gpu", "1.31.1")):
        install(site, name, version, "onnxruntime/__init__.py")

    for engine in (CPU_ENGINE, CUDA_ENGINE):
        found = engine.availability()
        assert not found.usable
        assert "onnxruntime 1.32.0 and onnxruntime-gpu 1.31.1" in str(found.reason)
        assert found.next_action == (
            "Run `pip uninstall -y onnxruntime onnxruntime-gpu`, then `pip install onnxruntime-gpu`."
        )
        with pytest.raises(EngineUnavailableError, match="onnxruntime-gpu"):
            engine.open(model, {})


def test_no_distribution_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing is said as missing."""
    monkeypatch.setattr(ort_runtime, "installed_distributions", dict)

    assert not CPU_ENGINE.availability().usable
    assert "not installed" in str(CPU_ENGINE.availability().reason)


def test_what_native_code_writes_is_captured_and_then_flows_again(capfd: pytest.CaptureFixture[str]) -> None:
    """Only the block is silenced; its lines are kept, from file descriptor 2 and from print alike."""
    with captured_stderr() as lines:
        os.write(2, b"from native code\n")
        sys.stdout.write("from Python\n")
    os.write(2, b"afterwards\n")

    assert lines == ["from native code", "from Python"]
    assert capfd.readouterr() == ("", "afterwards\n")


@pytest.mark.parametrize(("given", "kept"), [(None, "1"), ("0", "0")])
def test_the_runtime_reports_to_nobody_unless_it_was_told_to(
    given: str | None, kept: str, tmp_path: Path
) -> None:
    """Asking whether it is there imports it; by then the variable is set, and it leaves no file."""
    code = "import os; from harness.engines.ort import CPU_ENGINE; assert CPU_ENGINE.availability().usable"
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment |= {"TMPDIR": str(tmp_path)} | ({} if given is None else {"ORT_DISABLE_TELEMETRY": given})
    run = subprocess.run(
        [sys.executable, "-c", f"{code}; print(os.environ['ORT_DISABLE_TELEMETRY'])"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == kept
    assert given is not None or list(tmp_path.iterdir()) == []
