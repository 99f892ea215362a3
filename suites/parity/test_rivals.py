"""The oracle against a second witness: decided as surely as against the candidate, with what it rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.decoders import TinyDecoder
from harness.decode.loop import one_pass_decode
from harness.decode.trace import Trace
from harness.engines.registry import parse_engine
from harness.parity.reference import Reference
from harness.parity.spread import SPREAD_FACTOR, spread_between

DECODER = TinyDecoder(layers="rar", seed=25)
PROMPT = (1, 2, 3)
TOKENS = DECODER.greedy(PROMPT, 40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid whose states grow: rounding matters six times as much behind the probe as on it."""
    return DECODER.save(tmp_path_factory.mktemp("rivals") / "model.onnx")


@pytest.fixture
def reference(model: Path) -> Reference:
    """A fresh oracle, that has measured nothing yet."""
    return Reference(parse_engine("oracle"), model, DECODER.topology, mode="one-pass", top_k=5)


def in_precision(model: Path, precision: str) -> Trace:
    """The oracle along the tokens, in one precision."""
    session = parse_engine(f"oracle:precision={precision}").open(model)
    trace = one_pass_decode(session, DECODER.topology, PROMPT, TOKENS)
    assert trace is not None
    return trace


@pytest.mark.parametrize("at", [0, 17, 39])
def test_where_a_rival_differs_the_oracle_decides_in_float64(
    model: Path, reference: Reference, at: int
) -> None:
    """There and nowhere else: what both agree on costs nothing."""
    rivals = [*TOKENS]
    rivals[at] = (TOKENS[at] + 1) % DECODER.vocab
    verified = reference.verify(PROMPT, TOKENS, rivals=rivals)
    exact, rough = in_precision(model, "float64"), in_precision(model, "float32")
    assert verified.trace.steps[at] == exact.steps[at] != rough.steps[at]
    others = [i for i in range(len(TOKENS)) if i != at]
    assert [verified.trace.steps[i] for i in others] == [rough.steps[i] for i in others]
    assert verified.bands[at] < min(verified.bands[i] for i in others)


def test_what_the_oracle_rounds_is_measured_along_all_tokens_once_they_are_decided_again(
    model: Path, reference: Reference
) -> None:
    """The probe sees few of them: its band stands where nothing else was run."""
    probed = reference.verify(PROMPT, TOKENS)
    assert probed.rounding == max(probed.bands)
    rivals = [(token + 1) % DECODER.vocab for token in TOKENS]
    whole = reference.verify(PROMPT, TOKENS, rivals=rivals)
    spread = spread_between(in_precision(model, "float32"), in_precision(model, "float64"))
    assert whole.rounding == 2 * SPREAD_FACTOR * spread > probed.rounding
