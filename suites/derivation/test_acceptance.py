"""Which pairs of shapes and dtypes can be one cache, and which cannot: the rules, one at a time."""

from __future__ import annotations

import pytest

from fixtures.layouts import interface
from harness.ports import Dimension, Port, PortInventory
from harness.topology.resolve import resolve
from harness.topology.shapes import StateShapeMatch
from harness.topology.spec import Derivation

Shape = tuple[Dimension, ...]


def kv(
    past: Shape | None,
    present: Shape | None,
    names: tuple[str, str] = ("past_key_values.0.key", "present.0.key"),
) -> Derivation:
    """A decoder with one KV pair of these shapes, whose tokens are [batch, sequence_len]."""
    ports = interface(vocab=1000)
    before = Port(names[0], "float16", past)
    after = Port(names[1], "float16", present)
    return resolve(PortInventory((*ports.inputs, before), (*ports.outputs, after)))


def state(past: Shape | None, present: Shape | None) -> Derivation:
    """A decoder with one state of these shapes."""
    return kv(past, present, ("past_key_values.0.conv_state", "present.0.conv_state"))


def code(derivation: Derivation) -> str | None:
    """The leading code, None where it derives."""
    return None if derivation.refusal is None else derivation.refusal.code


@pytest.mark.parametrize(
    ("past", "present"),
    [
        (("batch", 2, "past", 16), ("batch", 2, "total", 16)),
        (("batch", 2, "past", 16), ("batch", 2, "past + 1", 16)),
        (("batch", 2, 16, "past"), ("batch", 2, 16, "total")),
        (("batch * heads", "past", 16), ("batch * heads", "total", 16)),
        (("batch", 2, "past", "width"), ("batch", 2, "total", "width")),
        (("batch", 2, "past", 16), ("unk0", "unk1", "unk2", "unk3")),
        (("batch", 2, "past", 16), ("rows", 2, "total", 16)),
        (("?", 2, "?", 16), ("?", 2, "?", 16)),
        (("batch", 2, None, 16), ("batch", 2, None, 16)),
        ((1, 2, 256, 16), (1, 2, 256, 16)),
        (("batch", 2, "max", 16), ("batch", 2, "max", 16)),
        ((1, 2, 0, 16), (1, 2, "n", 16)),
        ((1, 2, 0, 16), (1, 2, "sequence_len", 16)),
        (None, ("batch", 2, "total", 16)),
        (("batch", 2, "past", 16), None),
        (None, None),
    ],
)
def test_kv_that_may_grow_or_keep_its_size_is_accepted(past: Shape | None, present: Shape | None) -> None:
    """One axis that differs, none at all, or symbols that say nothing: nothing contradicts."""
    assert code(kv(past, present)) is None


@pytest.mark.parametrize(
    ("past", "present"),
    [
        (("batch", 2, "past", 16), ("batch", 2, "total", 32)),
        (("batch", 2, "past", 16), ("batch", 2, "total")),
        ((1, 2, 127, 16), (1, 2, 128, 16)),
        (("batch", "heads", "past", 16), ("batch", "heads2", "total", 16)),
        (("batch", 2, "past", 16), ("batch", 2, 1, 16)),
        (("batch", 2, "past", 16), ("batch", 2, "sequence_len", 16)),
    ],
    ids=["width", "rank", "length", "two-axes", "one-token", "this-call-only"],
)
def test_kv_that_cannot_feed_itself_is_refused(past: Shape, present: Shape) -> None:
    """Other extents, another rank, two growing axes, or a present that holds this call's tokens only."""
    derivation = kv(past, present)
    assert code(derivation) == "E_SHAPE_MISMATCH"
    assert derivation.refusal is not None
    assert set(derivation.refusal.ports) == {"past_key_values.0.key", "present.0.key"}


@pytest.mark.parametrize(
    ("length", "grows"), [("past", True), (None, True), (0, True), (1, False), (127, False)]
)
def test_a_name_that_says_little_needs_a_length_from_which_a_cache_grows(
    length: Dimension, grows: bool
) -> None:
    """Unknown or empty before the first call; a length of its own could be a buffer's or a state's."""
    found = kv(
        (2, "batch", 4, length, 16),
        (2, "batch", 4, "total", 16),
        ("past_key_values_0", "present_key_values_0"),
    )
    assert code(found) == (None if grows else "E_AMBIGUOUS_STATE_PAIRING")


@pytest.mark.parametrize(
    ("past", "present"),
    [
        (("batch", 64, 3), ("batch", 64, 3)),
        (("batch", 64, 3), ("u0", "u1", "u2")),
        (("batch", 64, 3), ("batch", 64, "sequence_len + 2")),
        ((2, "batch", 64), (2, "batch", 64)),
        ((4, "batch_size", 64, 3), (4, "batch_size", 64, 3)),
        ((2, "N", 64), (2, "N", 64)),
        (("rows", 64, 3), ("rows", 64, 3)),
        (("MAX_BATCH", 64, 3), ("MAX_BATCH", 64, 3)),
        ((None, 64, 3), (None, 64, 3)),
        ((1, 64, 3), (1, 64, 3)),
    ],
)
def test_a_state_with_known_extents_is_accepted(past: Shape, present: Shape) -> None:
    """The batch may be symbolic, in front or behind a stack of layers; the present may be all symbols."""
    assert code(state(past, present)) is None


@pytest.mark.parametrize(
    ("driving", "fits"),
    [
        (Port("input_ids", "int64", ("rows", "s")), True),
        (Port("inputs_embeds", "float16", ("rows", "s", 64)), True),
        (Port("input_ids", "int64", ("s", "rows")), False),
        (Port("input_ids", "int64", None), False),
    ],
    ids=["tokens", "embeddings", "another-axis", "no-shape"],
)
def test_the_batch_of_a_state_may_be_called_as_the_tokens_call_it(driving: Port, fits: bool) -> None:
    """Behind a stack of layers a symbol is the batch by its word, or since the driving port leads with it."""
    shape = (2, "rows", 64)
    found = resolve(
        PortInventory(
            (driving, Port("past_key_values.0.conv_state", "float16", shape)),
            (
                Port("logits", "float16", ("rows", "s", 1000)),
                Port("present.0.conv_state", "float16", shape),
            ),
        )
    )
    assert code(found) == (None if fits else "E_STATE_DYNAMIC_DIM")


@pytest.mark.parametrize(
    "past",
    [
        ("batch", "channels", 3),
        ("batch", 64, "window"),
        ("batch", 64, None),
        ("batch * heads", 64, 3),
        (1, "channels", 3),
        ("batch", "batch", 3),
        None,
    ],
    ids=["channels", "window", "nameless", "expression", "not-the-batch", "twice", "no-shape"],
)
def test_a_state_whose_zeros_have_no_shape_is_refused(past: Shape | None) -> None:
    """A wrong guess would run through broadcasting, and give wrong tokens."""
    derivation = state(past, past)
    assert code(derivation) == "E_STATE_DYNAMIC_DIM"
    assert derivation.refusal is not None
    assert derivation.refusal.ports == ("past_key_values.0.conv_state",)


@pytest.mark.parametrize(
    ("past", "present", "exact", "symbolic"),
    [
        (("b", 2), ("b", 2), True, True),
        (("b", 2), ("c", 2), False, True),
        (("b", 2), ("b", "d"), False, True),
        (("b", 2), ("b", 3), False, False),
        (("b", 2), ("b", 2, 1), False, False),
        (("b", 2), None, False, True),
        (None, None, False, True),
    ],
)
def test_exact_and_symbolic_matching(
    past: Shape | None, present: Shape | None, exact: bool, symbolic: bool
) -> None:
    """Exact: spelled alike. Symbolic: a symbol is unknown, and two extents that differ always fail."""
    assert StateShapeMatch.EXACT.accepts(past, present) is exact
    assert StateShapeMatch.SYMBOLIC.accepts(past, present) is symbolic


def test_a_dtype_that_changes_on_the_way_is_refused() -> None:
    """A cast at every step would be a rounding that the model never had."""
    ports = interface(vocab=1000)
    past = Port("past_key_values.0.key", "float16", ("batch", 2, "past", 16))
    present = Port("present.0.key", "float32", ("batch", 2, "total", 16))
    derivation = resolve(PortInventory((*ports.inputs, past), (*ports.outputs, present)))
    assert code(derivation) == "E_DTYPE_MISMATCH"


@pytest.mark.parametrize("symbol", ["num_blocks", "block", "page_count"])
def test_a_pool_of_blocks_is_no_cache_of_a_sequence(symbol: str) -> None:
    """A paged cache has the names of a growing one, or of a state, and another meaning."""
    shape: Shape = (symbol, 16, 2, 16)
    assert code(kv(shape, shape)) == "E_UNSUPPORTED_LAYOUT_PAGED"
    assert code(state(shape, shape)) == "E_UNSUPPORTED_LAYOUT_PAGED"


def test_self_attention_names_with_an_encoders_length_are_refused() -> None:
    """A cross-attention layer under the names of self-attention shows in its length, and nowhere else."""
    assert code(kv(("batch", 2, "cross_past", 16), ("batch", 2, "cross_total", 16))) == "E_EVIDENCE_CONFLICT"


@pytest.mark.parametrize("lacking", ["write_indices", "nonpad_kv_seqlen"])
def test_a_scatter_cache_needs_both_control_ports(lacking: str) -> None:
    """Without the index nobody knows where to write, without the length nobody knows what counts."""
    ports = interface(vocab=1000)
    controls = [
        Port(name, "int64", ("batch",)) for name in ("write_indices", "nonpad_kv_seqlen") if name != lacking
    ]
    buffer = ("batch", 64, 32)
    derivation = resolve(
        PortInventory(
            (*ports.inputs, Port("key_cache.0", "float32", buffer), *controls),
            (*ports.outputs, Port("updated_key_cache.0", "float32", buffer)),
        )
    )
    assert code(derivation) == "E_INCOMPLETE_CONTROL_PORTS"
    assert derivation.refusal is not None
    assert "key_cache.0" in derivation.refusal.ports


def test_a_scatter_cache_that_grows_after_all_needs_none() -> None:
    """Under these names a cache that is seen to grow is threaded like any other."""
    names = ("key_cache.0", "updated_key_cache.0")
    growing = kv(("batch", "past", 32), ("batch", "total", 32), names)
    assert growing.topology is not None
    assert growing.topology.kv_inputs == ("key_cache.0",)
    assert growing.topology.static_cache is None
