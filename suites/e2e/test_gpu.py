"""Real models on an NVIDIA GPU: their tokens are the oracle's, byte for byte, whatever a sidecar declares.

Gated twice: it needs a GPU, and packages under `ONNX_PARITY_MODEL_DIR`. Where one is not there it is skipped
by name; with `ONNX_PARITY_REQUIRE=cuda,model` it fails, and so does a session that ran none of it. How the
gates behave is specified in `test_gates.py`. Run it with `pytest suites/e2e/test_gpu.py` (docs/nightly.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.cli.app import run
from harness.package import open_package
from harness.pytest_plugin.checks import Parity

pytestmark = pytest.mark.gpu

GOLDENS = Path(__file__).parents[2] / "fixtures/goldens"
NEW_TOKENS = 32
FEWEST = 16
WITHOUT_TOKENIZER = ((1, 2, 3),)


def decoded_on_cuda(parity: Parity, package: str | Path, **options: Any) -> Mapping[str, Any]:
    """The report of a check whose every token is the oracle's, and whose nodes ran on CUDA."""
    document = parity.check(package, candidate="ort-cuda", **options).document
    candidate = document["candidate"]
    assert (candidate["engine"], candidate["process"]) == ("ort-cuda", "isolated")
    assert "CUDAExecutionProvider" in candidate["placement"]["providers"]
    assert candidate["settings"].get("use_tf32", "0") == "0"
    assert document["prompts"]
    for prompt in document["prompts"]:
        assert len(prompt["candidate_ids"]) >= FEWEST
        assert prompt["candidate_ids"] == prompt["oracle_ids"] == prompt["oracle_forced_ids"]
        assert prompt["candidate_sha256"] == prompt["oracle_sha256"]
        timing = prompt["timing"]
        for side in ("candidate", "oracle"):
            assert timing[f"{side}_s"] > 0
            assert timing[f"{side}_tokens_per_s"] > 0
    return document


def judge_golden(document: Mapping[str, Any]) -> None:
    """Fail unless the tokens are those of the golden; skip where it does not say of which model it is."""
    if document["exit_code"] == 0:
        return
    found = [prompt["first_difference"] for prompt in document["prompts"]]
    if (document["golden"] or {}).get("advisory") and document["outcome"] == "inconclusive":
        pytest.skip(f"advisory, as it does not say of which model it is; first differences: {found}")
    error = document["error"] or {}
    pytest.fail(
        f"{document['outcome']}, first differences: {found} {error.get('message', '')}", pytrace=False
    )


def test_a_package_decodes_to_the_tokens_of_the_oracle(parity: Parity, parity_package: Path) -> None:
    """Its topology is derived from the ports, as if no sidecar had a word on them."""
    prompts = None if open_package(parity_package).tokenizer is not None else WITHOUT_TOKENIZER
    document = decoded_on_cuda(
        parity, parity_package, prompts=prompts, max_new_tokens=NEW_TOKENS, ignore_declared=True
    )
    assert document["model"]["topology"]["outcome"] == "derived"


def test_a_package_gives_the_tokens_of_its_golden(
    parity: Parity, parity_package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of `fixtures/goldens` with the name of its folder; one of another model is never a pass."""
    golden = GOLDENS / f"{parity_package.name}.json"
    if not golden.exists():
        pytest.skip(f"there is no golden {golden.name}: `onnx-parity golden record` makes one")
    options = "--candidate", "ort-cuda", "--ignore-declared", "--json"
    run(["golden", "check", str(golden), str(parity_package), *options])
    judge_golden(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("name", ["demo", "demo-ops"])
def test_a_built_in_package_decodes_to_the_tokens_of_the_oracle(parity: Parity, name: str) -> None:
    """They need no folder of models: a machine with a GPU can always run these."""
    document = decoded_on_cuda(parity, name)
    assert document["model"]["path"] == name
