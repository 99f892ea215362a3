"""What `ort-cuda` asks of the CUDA provider and makes of its answers, on any machine.

There is a real session, on the CPU, that claims to be on CUDA: nothing here has run on a GPU. What a GPU
computes is for `suites/e2e/test_gpu.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from fixtures.decoders import save_graph
from harness.engines.base import Session
from harness.engines.ort import CUDA_ENGINE
from harness.engines.ort_cuda import provider_settings
from harness.engines.ort_runtime import cpu_availability
from harness.errors import EngineFailedError, InvalidRunError

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

DEFAULTS = {
    "device_id": "0",
    "use_tf32": "0",
    "sdpa_kernel": "0",
    "enable_cuda_graph": "0",
    "cudnn_conv_algo_search": "HEURISTIC",
    "prefer_nhwc": "0",
    "tunable_op_enable": "0",
}


class Claimed:
    """A session on the CPU that says what one on CUDA would say.

    `told` is where its options differ, and `refuses` what it answers to graph capture, if it does not do it.
    """

    opened: ClassVar[list[Any]] = []
    told: ClassVar[Mapping[str, str]] = {}
    refuses: ClassVar[str] = ""

    def __init__(self, model: str, options: Any, *, providers: list[Any], enable_fallback: int) -> None:
        self.asked, self.options, self.providers = dict(providers[0][1]), options, providers
        self.enable_fallback = enable_fallback
        if self.refuses and self.asked["enable_cuda_graph"] == "1":
            raise RuntimeError(self.refuses)
        self._real = onnxruntime.InferenceSession(model, options, providers=[CPU])
        Claimed.opened.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def get_providers(self) -> list[str]:
        """The first is where it runs."""
        return [CUDA, CPU]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """What it was asked for, and more."""
        return {CUDA: {**self.asked, "gpu_mem_limit": "1", **self.told}, CPU: {}}

    def get_provider_graph_assignment_info(self) -> list[Any]:
        """The real nodes."""
        real = self._real.get_provider_graph_assignment_info()
        return [SimpleNamespace(ep_name=CUDA, get_nodes=part.get_nodes) for part in real]


class Runtime:
    """The module `onnxruntime`, with that session."""

    InferenceSession = Claimed

    def __getattr__(self, name: str) -> Any:
        return getattr(onnxruntime, name)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A product; the CUDA provider is what the class above claims."""
    monkeypatch.setattr("harness.engines.ort.cuda_availability", lambda device: cpu_availability())
    monkeypatch.setattr("harness.engines.ort.load_runtime", Runtime)
    monkeypatch.setattr(Claimed, "opened", [])
    for name in ("ORT_DISABLE_FLASH_ATTENTION", "ORT_ENABLE_XQA"):
        monkeypatch.delenv(name, raising=False)
    real = TensorProto.FLOAT
    return save_graph(
        tmp_path / "model.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [helper.make_tensor_value_info("x", real, ["n", 2])],
        [helper.make_tensor_value_info("y", real, ["n", 2])],
        {"w": np.eye(2, dtype=np.float32)},
    )


def opened(model: Path, **options: Any) -> tuple[Session, Claimed]:
    """Our session, and the one behind it."""
    session = CUDA_ENGINE.open(model, options)
    (claimed,) = Claimed.opened
    return session, claimed


def test_every_setting_that_changes_results_is_pinned_and_reported(model: Path) -> None:
    """TF32 off, no graph capture, no kernel chosen by a race; the CPU only behind CUDA, no fallback."""
    session, claimed = opened(model)

    assert claimed.asked == DEFAULTS
    assert [provider if isinstance(provider, str) else provider[0] for provider in claimed.providers] == [
        CUDA,
        CPU,
    ]
    assert claimed.enable_fallback == 0
    assert claimed.options.use_deterministic_compute is False
    assert dict(session.info.settings) == {
        "threads": 0,
        "opt": "all",
        "inter_op_threads": 1,
        "deterministic_compute": False,
        **DEFAULTS,
    }
    assert session.info.mode == "eager"
    assert session.info.placement == {"providers": {CUDA: {"MatMul": 1}}}


@pytest.mark.parametrize(
    ("option", "setting", "value"),
    [
        ({"tf32": "1"}, "use_tf32", "1"),
        ({"device": 2}, "device_id", "2"),
        # Bits of AttentionBackend; the unfused kernel cannot be taken away.
        ({"attention": "flash"}, "sdpa_kernel", "1"),
        ({"attention": "efficient"}, "sdpa_kernel", "2"),
        ({"attention": "cudnn"}, "sdpa_kernel", "8"),
        ({"attention": "math"}, "sdpa_kernel", "16"),
        ({"graph": "captured"}, "enable_cuda_graph", "1"),
    ],
)
def test_an_option_reaches_the_provider_and_the_report(
    model: Path, option: dict[str, Any], setting: str, value: str
) -> None:
    """And changes nothing else."""
    session, claimed = opened(model, **option)
    assert claimed.asked == DEFAULTS | {setting: value}
    assert session.info.settings[setting] == value


@pytest.mark.parametrize(("asked", "expected"), [("0", False), ("1", True)])
def test_deterministic_compute_reaches_the_runtime(model: Path, asked: str, expected: bool) -> None:
    """And into the report."""
    session, claimed = opened(model, deterministic=asked)
    assert claimed.options.use_deterministic_compute is expected
    assert session.info.settings["deterministic_compute"] is expected


def test_a_provider_that_runs_with_another_setting_is_an_invalid_run(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking proves nothing: what the session says counts."""
    monkeypatch.setattr(Claimed, "told", {"use_tf32": "1"})
    with pytest.raises(InvalidRunError, match="asked for use_tf32=0, and runs with use_tf32=1"):
        opened(model)


def test_truth_values_may_be_written_in_words() -> None:
    """Releases differ; what is meant counts, and the report has it as it was told."""
    asked = {"use_tf32": "0", "enable_cuda_graph": "1"}
    told = {"use_tf32": "False", "enable_cuda_graph": "True"}
    assert provider_settings(asked, told, {}) == told


def test_an_option_that_a_release_lacks_is_not_reported() -> None:
    """Nothing is claimed that the runtime does not say."""
    assert provider_settings({"use_tf32": "0", "new_option": "1"}, {"use_tf32": "0"}, {}) == {"use_tf32": "0"}


def test_variables_that_choose_attention_kernels_are_reported(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs with the same options may differ by them."""
    monkeypatch.setenv("ORT_DISABLE_FLASH_ATTENTION", "1")
    monkeypatch.setenv("ORT_LOG_SEVERITY", "0")
    session, _ = opened(model)
    assert session.info.settings["ORT_DISABLE_FLASH_ATTENTION"] == "1"
    assert not {"ORT_ENABLE_XQA", "ORT_LOG_SEVERITY"} & set(session.info.settings)


def test_a_session_that_captures_says_so(model: Path) -> None:
    """The programs that look at its results do not: they read other memory each time."""
    session: Any = opened(model, graph="captured")[0]
    assert session.info.mode == "captured"
    (provider,) = session._programs._providers
    assert provider[1]["enable_cuda_graph"] == "0"


# As ONNX Runtime 1.24 to 1.32 says it of a graph with a Scan, and of one whose nodes are not all on CUDA.
CONTROL_FLOW = "the model has control flow nodes which can't be supported by CUDAExecutionProvider"
ELSEWHERE = "all compute graph nodes have not been partitioned to the CUDAExecutionProvider"
REFUSED = "1 : FAIL : This session cannot use the graph capture feature as requested by the user"


@pytest.mark.parametrize("why", [CONTROL_FLOW, ELSEWHERE])
def test_a_graph_that_cannot_be_captured_runs_eager_and_the_report_says_why(
    model: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Nothing else about the session is another."""
    monkeypatch.setattr(Claimed, "refuses", f"{REFUSED}  as {why}")
    session, claimed = opened(model, graph="captured", tf32="1")
    assert session.info.mode == "eager"
    assert claimed.asked == DEFAULTS | {"use_tf32": "1"}
    assert session.info.settings["graph_capture"] == f"refused: {why}"
    assert session.info.settings["enable_cuda_graph"] == "0"


def test_another_failure_of_a_session_that_was_to_capture_stays_what_it_is(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not tried again as if it were about capture."""
    monkeypatch.setattr(Claimed, "refuses", "CUDA failure 2: out of memory")
    with pytest.raises(EngineFailedError, match="out of memory"):
        opened(model, graph="captured")
    assert Claimed.opened == []
