"""Pairing by name: one present to each past, one past to each present, and indices that are indices."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fixtures.layouts import dense_06b, interface, whisper_cross_kv
from harness.ports import Port, PortInventory
from harness.topology.patterns import PatternTable, StemTable, layer_of
from harness.topology.resolve import resolve
from harness.topology.spec import Derivation, Outcome, Refusal, Role
from harness.topology.swaps import cache_role, says_activation, says_attention, tokens, without

GROWING = ("batch", 2, "past", 16)
GROWN = ("batch", 2, "total", 16)
STATE = ("batch", 64, 3)


def refusal(pasts: list[Port], presents: list[Port]) -> Refusal:
    """The refusal of a decoder with these caches."""
    ports = interface(vocab=1000)
    found = resolve(PortInventory((*ports.inputs, *pasts), (*ports.outputs, *presents)))
    assert found.refusal is not None, found.topology
    return found.refusal


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("past_key_values.0.key", "0"),
        ("past_key_values.17.key", "17"),
        ("past_key_values.007.key", "007"),
        ("past_key_values.x.key", None),
        ("past_key_values.\0.key", None),
        ("past_key_values..key", None),
        ("past_key_values.٣.key", None),
        ("past_key_values.1a.key", None),
        ("past_key_values.-1.key", None),
        ("past_key_values.1.5.key", None),
        ("past_key_values.1.keys", None),
        ("xpast_key_values.1.key", None),
    ],
)
def test_an_index_is_ascii_digits_and_nothing_else(name: str, index: str | None) -> None:
    """`%d` stands for one run of digits between the literal parts of a pattern."""
    table = PatternTable([("past_key_values.%d.key", "entry")])
    assert table.matches(name) == ([] if index is None else [("entry", index)])


def test_digits_in_a_pattern_are_literal() -> None:
    """A pattern may have digits of its own, which are not the layer; nor is a second `%d`."""
    table = PatternTable([("v2.%d.key3", "entry"), ("v2.plain", "other")])
    assert table.matches("v2.7.key3") == [("entry", "7")]
    assert table.matches("v3.7.key3") == []
    assert table.matches("v2.7.key4") == []
    assert table.matches("v2.plain") == [("other", "")]
    assert table.matches("v3.plain") == []
    twice = PatternTable([("a%d.%d", "entry")])
    assert twice.matches("a7.%d") == [("entry", "7")]
    assert twice.matches("a7.7") == []


def test_a_stem_is_not_empty() -> None:
    """`*` stands for some text, so the prefix alone is no name of a state."""
    table = StemTable([("past_*", "prefix"), ("*_in", "suffix")])
    assert table.matches("past_conv.0") == [("prefix", "conv.0")]
    assert table.matches("past_") == []
    assert table.matches("x_in") == [("suffix", "x")]
    assert table.matches("past_x_in") == [("prefix", "x_in"), ("suffix", "past_x")]
    between = StemTable([("in_*_in", "both")])
    assert between.matches("in_x_in") == [("both", "x")]
    assert between.matches("in_in") == []
    twice = StemTable([("a*.*", "entry")])
    assert twice.matches("a_x.*") == [("entry", "_x")]
    assert twice.matches("a_x.y") == []


@pytest.mark.parametrize(
    ("text", "layer"),
    [
        ("0.conv", 0),
        ("conv.12", 12),
        ("a_3_b", 3),
        ("h0", None),
        ("conv", None),
        ("123456789", 123456789),
        ("1234567890", None),
    ],
)
def test_a_layer_is_a_number_that_stands_alone(text: str, layer: int | None) -> None:
    """A digit that belongs to a word is no layer, nor is a number of ten digits or more."""
    assert layer_of(text) == layer


@pytest.mark.parametrize(("index", "layer"), [("007", 7), ("123456789", 123456789), ("1234567890", None)])
@pytest.mark.parametrize("only_read", [False, True])
def test_an_index_of_any_length_pairs_and_only_a_short_one_is_a_layer(
    index: str, layer: int | None, only_read: bool
) -> None:
    """Pairing goes by the digits as they stand; what reports give as a layer is a number one can count to."""
    kind = "encoder.key" if only_read else "key"
    ports = dense_06b(layers=1)
    past = Port(f"past_key_values.{index}.{kind}", "float32", GROWING)
    presents = () if only_read else (Port(f"present.{index}.{kind}", "float32", GROWN),)
    found = resolve(PortInventory((*ports.inputs, past), (*ports.outputs, *presents))).topology
    assert found is not None
    assert [port.layer for port in found.roles if index in port.name] == [layer] * (1 + len(presents))


def test_a_past_with_two_presents_is_ambiguous() -> None:
    """Two conventions each find a present of their own: nothing says which is meant."""
    found = refusal(
        [Port("past_states.0.ssm", "float32", STATE)],
        [Port("present.0.ssm", "float32", STATE), Port("present_states.0.ssm", "float32", STATE)],
    )
    assert found.code == "E_AMBIGUOUS_STATE_PAIRING"
    assert set(found.ports) == {"past_states.0.ssm", "present.0.ssm", "present_states.0.ssm"}


def test_a_present_with_two_pasts_is_ambiguous() -> None:
    """One output cannot be the next value of two inputs."""
    found = refusal(
        [Port("past_key_values.0.key", "float32", GROWING), Port("past.0.key", "float32", GROWING)],
        [Port("present.0.key", "float32", GROWN)],
    )
    assert found.code == "E_AMBIGUOUS_STATE_PAIRING"
    assert set(found.ports) == {"past_key_values.0.key", "past.0.key", "present.0.key"}


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_a_name_that_stands_twice_is_refused(side: str) -> None:
    """Whoever feeds by name would feed one of them only."""
    ports = dense_06b(layers=1)
    twice = PortInventory(
        (*ports.inputs, ports.inputs[-1]) if side == "inputs" else ports.inputs,
        (*ports.outputs, ports.outputs[-1]) if side == "outputs" else ports.outputs,
    )
    found = resolve(twice).refusal
    assert found is not None
    assert (found.code, found.ports) == ("E_DUPLICATE_PORT", (getattr(ports, side)[-1].name,))


@pytest.mark.parametrize(
    "port",
    [
        Port("", "float32", (1,)),
        Port("a\0b", "float32", (1,)),
        Port("x", "float32", (-1, 3)),
        Port("x", "float32", (1 << 63,)),
    ],
    ids=["nameless", "nul", "negative", "beyond-int64"],
)
def test_a_port_that_cannot_be_is_malformed(port: Port) -> None:
    """Names and extents that no tensor has are refused before anything is concluded from them."""
    ports = dense_06b(layers=1)
    derivation = resolve(PortInventory((*ports.inputs, port), ports.outputs))
    assert derivation.outcome is Outcome.REFUSED
    assert derivation.refusal is not None
    assert (derivation.refusal.code, derivation.refusal.ports) == ("E_MALFORMED_PORT", (port.name,))


def test_the_largest_extent_that_a_file_can_say_is_one() -> None:
    """Such a port may be of no use, and it is not malformed."""
    ports = dense_06b(layers=1)
    port = Port("x", "float32", ((1 << 63) - 1,))
    found = resolve(PortInventory(ports.inputs, (*ports.outputs, port))).topology
    assert found is not None
    assert {one.name: one.role for one in found.roles}["x"] is Role.AUXILIARY


def test_an_unknown_gate_is_an_error() -> None:
    """A misspelt one must not pass for the default."""
    with pytest.raises(ValueError, match="recurrent"):
        resolve(dense_06b(layers=1), gate="recurrent")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["block_table", "slot_mapping", "cumulative_sequence_lengths"])
def test_paged_bookkeeping_is_refused_whatever_the_caches_look_like(name: str) -> None:
    """The shapes may be plain: a graph with block tables is not driven as a cache of one sequence."""
    ports = dense_06b(layers=1)
    inventory = PortInventory((*ports.inputs, Port(name, "int32", ("batch", 4))), ports.outputs)
    found = resolve(inventory).refusal
    assert found is not None
    assert (found.code, found.ports) == ("E_UNSUPPORTED_LAYOUT_PAGED", (name,))


def test_missing_partners_are_named_and_no_layer_is_paired_with_another() -> None:
    """Layers 3 and 7 go in, 3 and 4 come out: 3 is a pair, and what is left of each is none."""
    found = refusal(
        [Port(f"past_key_values.{layer}.key", "float32", GROWING) for layer in (3, 7)],
        [Port(f"present.{layer}.key", "float32", GROWN) for layer in (3, 4)],
    )
    assert found.code == "E_LAYER_ID_MISMATCH"
    assert set(found.ports) == {"past_key_values.7.key", "present.4.key"}


@pytest.mark.parametrize(
    ("past", "present"),
    [
        ("key_cache.3", "updated_key_cache.4"),
        ("past_key_self_7", "present_key_self_8"),
        ("shift_1_in", "shift_2_out"),
    ],
)
def test_partners_under_other_indices_are_named_in_every_naming(past: str, present: str) -> None:
    """Full patterns, and words swapped where the graph is seen to swap them: pairing would be a guess."""
    found = refusal(
        [Port("shift_0_in", "float32", STATE), Port(past, "float32", STATE)],
        [Port("shift_0_out", "float32", STATE), Port(present, "float32", STATE)],
    )
    assert (found.code, found.ports) == ("E_LAYER_ID_MISMATCH", (past, present))


@pytest.mark.parametrize(
    ("past", "present"),
    [("past_key_values_1_conv", "present_1_conv"), ("shift_0_in", "shift_0_out")],
    ids=["stem", "swap"],
)
def test_a_dispute_over_one_input_leaves_the_next_one_alone(past: str, present: str) -> None:
    """Two presents fit the first input, and nothing is wrong with what follows it."""
    disputed = ("present_key_values_0_key", "present_0_key")
    found = refusal(
        [Port("past_key_values_0_key", "float32", GROWING), Port(past, "float32", STATE)],
        [*(Port(name, "float32", GROWN) for name in disputed), Port(present, "float32", STATE)],
    )
    assert (found.code, found.also) == ("E_AMBIGUOUS_STATE_PAIRING", ())
    assert set(found.ports) == {"past_key_values_0_key", *disputed}


def test_names_that_separators_alone_tell_apart_are_one_dispute() -> None:
    """Nothing says which is whose: one reason for all of them, with each of their names."""
    pasts, presents = ("h.0", "h_0"), ("h.0.out", "h_0_out", "h_0.out")
    found = refusal(
        [Port(name, "float32", STATE) for name in pasts], [Port(name, "float32", STATE) for name in presents]
    )
    assert (found.code, found.also) == ("E_AMBIGUOUS_STATE_PAIRING", ())
    assert found.ports == (*pasts, *presents)
    assert "`h.0`, `h_0` could each be paired with each of `h.0.out`, `h_0_out`, `h_0.out`" in found.message


@pytest.mark.parametrize("separators", [".", "._", "._/"])
def test_each_past_with_presents_of_its_own_is_a_dispute_of_its_own(separators: str) -> None:
    """Two, three or four outputs with the words of each input: nothing is bound, and no layers are mixed."""
    pasts = [f"shift_{layer}_in" for layer in (0, 1)]
    presents = [[f"shift{by}{layer}{by}out" for by in (*separators, " ")] for layer in (0, 1)]
    found = refusal(
        [Port(name, "float32", STATE) for name in pasts],
        [Port(name, "float32", STATE) for layer in presents for name in layer],
    )
    assert (found.code, found.also) == ("E_AMBIGUOUS_STATE_PAIRING", ())
    assert found.ports == (pasts[0], *presents[0], pasts[1], *presents[1])
    assert found.message.startswith("`shift_0_in` could be paired with each of `shift.0.out`, ")


def test_keys_under_no_pattern_for_them_are_not_taken_for_a_state() -> None:
    """A fixed shape fits both, and zeros for keys would be wrong; a word for a state settles it."""
    found = refusal([Port("past_k_3", "float32", STATE)], [Port("present_k_3", "float32", STATE)])
    assert (found.code, found.ports) == ("E_AMBIGUOUS_STATE_PAIRING", ("past_k_3", "present_k_3"))
    ports = interface(vocab=1000)
    past, present = (Port(f"{side}_conv_k_3", "float32", STATE) for side in ("past", "present"))
    topology = resolve(PortInventory((*ports.inputs, past), (*ports.outputs, present))).topology
    assert topology is not None
    assert [pair.input for pair in topology.state_pairs] == ["past_conv_k_3"]


def test_cross_kv_of_which_only_some_comes_back_has_no_list_of_outputs() -> None:
    """A list that is shorter than that of the inputs would pair them wrongly; each port keeps its partner."""
    ports = whisper_cross_kv(layers=2)
    outputs = tuple(port for port in ports.outputs if port.name != "present.0.encoder.value")
    found = resolve(PortInventory(ports.inputs, outputs)).topology
    assert found is not None
    assert (len(found.cross_kv_inputs), found.cross_kv_outputs) == (4, ())
    pairs = {port.name: port.pair for port in found.roles if ".encoder." in port.name}
    assert pairs["past_key_values.0.encoder.key"] == "present.0.encoder.key"
    assert pairs["past_key_values.0.encoder.value"] is None


@pytest.mark.parametrize(
    ("pasts", "presents", "code"),
    [
        ((), ("present.0.key",), "E_PRESENT_WITHOUT_PAST"),
        (("past_key_values.0.key",), (), "E_UNPAIRED_PAST"),
        (("past_states.0.ssm",), (), "E_UNPAIRED_PAST"),
        ((), ("present_states.0.ssm",), "E_PRESENT_WITHOUT_PAST"),
    ],
)
def test_missing_partners_on_either_side_are_named(
    pasts: tuple[str, ...], presents: tuple[str, ...], code: str
) -> None:
    """Beside a whole pair, a cache that only goes in or only comes out is refused by its name."""
    found = refusal(
        [Port(name, "float32", GROWING) for name in ("past_key_values.9.key", *pasts)],
        [Port(name, "float32", GROWN) for name in ("present.9.key", *presents)],
    )
    assert (found.code, found.ports) == (code, (*pasts, *presents))


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("hidden_out", True),
        ("features", True),
        ("states", True),
        ("hidden_states", True),
        ("inputs_embeds", True),
        ("embedding_0", True),
        ("conv_states", False),
        ("lstm_hidden", False),
        ("conv", False),
        ("mask", False),
        ("", False),
    ],
)
def test_activations_are_told_by_words_that_no_state_takes_back(name: str, activation: bool) -> None:
    """Hidden states are handed on by many graphs; an LSTM's are its state."""
    assert says_activation(name) is activation


@pytest.mark.parametrize(
    ("name", "stem", "attention"),
    [
        ("past_0_key", "0_key", True),
        ("past_v_1", "v_1", True),
        ("past_kv_1", "kv_1", True),
        ("past_key_values.0.conv", "0.conv", False),
        ("past_key_conv", "key_conv", False),
        ("conv_past_key", "key", False),
        ("past_0", "0", False),
    ],
)
def test_attention_is_told_by_the_open_part_of_a_name(name: str, stem: str, attention: bool) -> None:
    """Words for keys and values count there; a word for a state anywhere takes them back."""
    assert says_attention(name, stem) is attention


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("k_cache", Role.KV_KEY),
        ("past_values", Role.KV_VALUE),
        ("kv", Role.KV_FUSED),
        ("k_v", Role.KV_FUSED),
        ("past_key_values.3.key", Role.KV_KEY),
        ("past_key_values.3.value", Role.KV_VALUE),
        ("past_key_values.3", Role.STATE),
        ("past_key_values", Role.KV_FUSED),
        ("key_values_k", Role.KV_KEY),
        ("key_scale", Role.KV_SCALE),
        ("value_scales", Role.KV_SCALE),
        ("kv_scale", Role.KV_SCALE),
        ("cross_k", Role.CROSS_KV_KEY),
        ("encoder_v", Role.CROSS_KV_VALUE),
        ("cross_kv", Role.CROSS_KV_KEY),
        ("cross_k_v", Role.CROSS_KV_KEY),
        ("key_conv", Role.STATE),
        ("anything", Role.STATE),
        ("present_k", Role.KV_KEY),
    ],
)
def test_the_words_of_a_cache_say_what_it_is(name: str, role: Role) -> None:
    """Keys, values or both, their scales, those of the encoder; a state where nothing says so."""
    assert cache_role(tokens(name)) is role


def test_a_word_is_taken_out_where_it_stands_once() -> None:
    """Twice or never, and nothing is left to compare."""
    said = tokens("a_in_0_b")
    assert said == ("a", "in", "0", "b")
    assert without(said, "in") == ("a", "0", "b")
    assert without(said, "") == said
    assert without(said, "out") == ()
    assert without((*said, "in"), "in") == ()
    assert tokens("Key12.Value") == ("key", "12", "value")
    assert tokens("state_\u03b1+1.\u72b6\u6001-x") == ("state", "\u03b1", "+", "1", "\u72b6\u6001", "x")
    assert tokens("h-_0") == ("h", "-", "0")
    assert without(("A", "In", "0"), "in") == ("A", "0")


STEMS = st.text("ahAH\u03b1\u03b2\u0391\u72b6\u6001\u00e9e\u0301\u212a+*#@()~", min_size=1, max_size=6)


def beside(past: str, present: str) -> Derivation:
    """What comes of these two ports of one shape beside one layer of KV."""
    ports = dense_06b(layers=1)
    inputs = (*ports.inputs, Port(past, "float32", STATE))
    return resolve(PortInventory(inputs, (*ports.outputs, Port(present, "float32", STATE))))


def states(past: str, present: str) -> list[tuple[str, str]]:
    """The states that are derived from these two ports; none of a refusal."""
    found = beside(past, present).topology
    return [(pair.input, pair.output) for pair in found.state_pairs] if found is not None else []


@pytest.mark.parametrize(("inward", "outward"), [("in", "out"), ("", "next"), ("prev", "")])
@given(stem=STEMS, other=STEMS)
def test_names_of_any_script_pair_where_they_differ_in_the_swap_word_alone(
    inward: str, outward: str, stem: str, other: str
) -> None:
    """The same text beside the word is a pair; any other text, by one letter, sign or case, is not."""
    assume(stem != other)
    past, present = (f"{stem}_0_{word}".rstrip("_") for word in (inward, outward))
    assert states(past, present) == [(past, present)]
    assert states(past, f"{other}_0_{outward}".rstrip("_")) == []


@pytest.mark.parametrize(
    ("past", "present"),
    [
        ("state_\u03b1", "state_\u03b2_out"),
        ("\u72b6\u6001_0", "\u7f13\u5b58_0_out"),
        ("h+_0_in", "h-_0_out"),
        ("h-_0_in", "h_0_out"),
        ("h_-1_in", "h_1_out"),
        ("h_A_in", "h_a_out"),
        ("caf\u00e9_in", "cafe\u0301_out"),
        ("\u212a_in", "k_out"),
        ("\u03b1in_0", "\u03b1out_0"),
        ("h'_in", "h''_out"),
    ],
    ids=ascii,
)
def test_names_that_only_look_alike_are_no_pair(past: str, present: str) -> None:
    """Another script, sign, sign of a number, case or composition is another name: refused, never guessed."""
    found = beside(past, present).refusal
    assert found is not None
    assert past in found.ports


@pytest.mark.parametrize(
    ("past", "present"), [("conv-state-0-in", "conv.state.0.out"), ("/a/h 1_in", "a:h__1.out")]
)
def test_separators_do_not_count(past: str, present: str) -> None:
    """What parts words may change with the word that is swapped; a hyphen between words parts them too."""
    assert states(past, present) == [(past, present)]
