"""One pass says what stepping says: 40 prompts x 64 tokens on each built-in package, planted faults included.

Slow (about ten minutes for each SmolLM2): run it with `pytest suites/e2e/test_one_pass.py -m slow`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from harness.decode.loop import greedy_decode
from harness.decode.trace import Trace
from harness.engines.registry import parse_engine
from harness.errors import InputError
from harness.models import builtin_package
from harness.package import open_package
from harness.parity.compare import compare_tokens
from harness.parity.reference import Reference
from harness.ports import read_ports
from harness.topology.resolve import resolve_package

pytestmark = pytest.mark.slow

PROMPTS = 40
NEW_TOKENS = 64
TOP_K = 5


def with_runner_up(trace: Trace, position: int) -> Trace:
    """The trace of a candidate that took the second-largest logit at `position`, and forgot that it did."""
    ids = list(trace.token_ids)
    ids[position] = trace.steps[position].token_ids[1]
    return replace(trace, token_ids=tuple(ids))


@pytest.mark.parametrize("name", ["demo", "demo-ops", "smollm2", "smollm2-int4"])
def test_one_pass_and_steps_give_the_same_verdict(name: str) -> None:
    """Seeded prompts of 1 to 24 tokens; every second candidate has one token replaced by its runner-up."""
    builtin = builtin_package(name)
    assert builtin is not None
    try:
        package = open_package(builtin.materialise())
    except InputError as error:
        pytest.skip(str(error))
    inventory = read_ports(package.model)
    topology = resolve_package(package, inventory).topology
    assert topology is not None
    (logits,) = (port for port in inventory.outputs if port.name == topology.logits_output)
    assert logits.shape is not None
    vocabulary = logits.shape[-1]
    assert isinstance(vocabulary, int)
    oracle = parse_engine("oracle")
    one_pass = Reference(oracle, package.model, topology, mode="one-pass", top_k=TOP_K)
    stepwise = Reference(oracle, package.model, topology, mode="stepwise", top_k=TOP_K)
    candidate = parse_engine("ort-cpu").open(package.model)
    rng = np.random.RandomState(0)
    verdicts = []
    for number in range(PROMPTS):
        prompt = tuple(rng.randint(0, vocabulary, rng.randint(1, 25)).tolist())
        trace = greedy_decode(candidate, topology, prompt, max_new_tokens=NEW_TOKENS, top_k=TOP_K)
        if number % 2:
            trace = with_runner_up(trace, rng.randint(0, NEW_TOKENS))
        found = []
        for side in (one_pass, stepwise):
            verified = side.verify(trace.prompt_ids, trace.token_ids)
            assert verified.mode == side.mode
            result = compare_tokens(trace, verified.trace, bands=verified.bands, undecided=verified.undecided)
            parted = result.first_divergence
            found.append(
                (result.verdict, result.oracle_ids, result.oracle_forced_ids, parted and parted.index)
            )
        assert found[0] == found[1]
        verdicts.append(found[0][0])
    assert one_pass.mode == "one-pass"
    assert stepwise.mode == "stepwise"
    assert verdicts.count("divergent") >= PROMPTS // 2
