"""Ports that are no caches: by name, and where names fail by dtype and shape, or refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.ports import Port, PortInventory
from harness.topology.interface import _OTHER_SCORES, _PART_WORDS, _RULES, _NameRule, words
from harness.topology.resolve import resolve
from harness.topology.spec import Derivation, Refusal, Role, Topology

KV_IN = Port("past_key_values.0.key", "float16", ("batch", 2, "past", 16))
KV_OUT = Port("present.0.key", "float16", ("batch", 2, "total", 16))
TOKENS = Port("input_ids", "int64", ("batch", "sequence"))
LOGITS = Port("logits", "float32", ("batch", "sequence", 1000))


def derivation(inputs: list[Port], outputs: list[Port]) -> Derivation:
    """What comes of these ports beside one cache."""
    return resolve(PortInventory((*inputs, KV_IN), (*outputs, KV_OUT)))


def topology(inputs: list[Port], outputs: list[Port]) -> Topology:
    """The topology of these ports beside one cache."""
    found = derivation(inputs, outputs)
    assert found.topology is not None, found.refusal
    return found.topology


def refusal(inputs: list[Port], outputs: list[Port]) -> Refusal:
    """The refusal of these ports beside one cache."""
    found = derivation(inputs, outputs)
    assert found.refusal is not None, found.topology
    return found.refusal


@pytest.mark.parametrize("name", ["input_ids", "decoder_input_ids", "tokens", "prev_token", "in", "targets"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_the_token_input_is_found_by_name_or_as_the_only_integer_matrix(name: str, dtype: str) -> None:
    """Exporters call it many things; batch by sequence of integers that is nothing else is the tokens."""
    assert topology([Port(name, dtype, ("b", "s"))], [LOGITS]).token_input == name


def test_two_integer_matrices_without_telling_names_are_ambiguous() -> None:
    """Neither is more of a token input than the other; both are named, and the key to declare."""
    found = refusal([Port(name, "int64", ("b", "s")) for name in ("left", "right")], [LOGITS])
    assert found.code == "E_AMBIGUOUS_TOKEN_INPUT"
    assert found.ports == ("left", "right")
    assert "model.io.token_input" in found.message


def test_tokens_and_embeddings_together_are_ambiguous() -> None:
    """Either may drive the decoder: some graphs of this sort take tokens, others embeddings."""
    embeds = Port("inputs_embeds", "float32", ("b", "s", 64))
    found = refusal([TOKENS, embeds], [LOGITS])
    assert found.code == "E_AMBIGUOUS_TOKEN_INPUT"
    assert set(found.ports) == {"input_ids", "inputs_embeds"}


def test_the_exact_name_goes_before_a_name_with_its_words() -> None:
    """Beside `input_ids` another port that speaks of a token is not its rival, and still unknown."""
    found = refusal([TOKENS, Port("token", "int64", ("b", "s"))], [LOGITS])
    assert (found.code, found.ports, found.also) == ("E_UNKNOWN_INPUT", ("token",), ())


@pytest.mark.parametrize(
    ("rule", "needed"),
    [
        pytest.param(rule, needed, id=f"{rule.role.value} {' '.join(sorted(needed))}")
        for rule in _RULES
        for needed in rule.words
    ],
)
def test_a_name_has_the_words_that_say_it_and_any_of_those_beside(
    rule: _NameRule, needed: frozenset[str]
) -> None:
    """None of them, each of them or all: the port is the same thing; any other word, and nobody knows."""
    dtype = "float32" if rule.role is Role.EMBEDS else "int64"
    shape = ("b", "s", 64) if rule.role is Role.EMBEDS else ("b", "s")
    for beside in ([], *([word] for word in sorted(rule.beside)), sorted(rule.beside)):
        port = Port("-".join([*beside, *sorted(needed)]), dtype, shape)
        driving = [] if rule.role in (Role.TOKEN, Role.EMBEDS) else [TOKENS]
        roles = {one.name: one.role for one in topology([*driving, port], [LOGITS]).roles}
        assert roles[port.name] is rule.role
        stranger = Port(f"{port.name}-unheard", dtype, shape)
        assert stranger.name in refusal([TOKENS, stranger], [LOGITS]).ports


@pytest.mark.parametrize(
    "name", ["attention_mask_\u03b2", "\u0446\u0435\u043b\u044c_position", "tok\u00ebn_ids"]
)
def test_a_word_of_another_script_is_a_word_that_nobody_knows(name: str) -> None:
    """It is not left out of the name: nothing says what such an input is."""
    found = refusal([TOKENS, Port(name, "int64", ("b", "s"))], [LOGITS])
    assert (found.code, found.ports) == ("E_UNKNOWN_INPUT", (name,))


def test_embeddings_alone_drive_the_decoder() -> None:
    """A decoder without its embedding table takes embeddings, and has no token input."""
    found = topology([Port("inputs_embeds", "float32", ("b", "s", 64))], [LOGITS])
    assert (found.token_input, found.inputs_embeds_input) == (None, "inputs_embeds")


@pytest.mark.parametrize("name", ["labels", "padding_mask", "segment_ids", "language_type"])
def test_an_integer_matrix_that_is_named_for_something_else_is_no_token_input(name: str) -> None:
    """Being the only candidate is not enough where the name says that it is another thing."""
    found = refusal([Port(name, "int64", ("b", "s"))], [LOGITS])
    assert found.code == "E_NO_TOKEN_INPUT"
    assert name in found.ports


@pytest.mark.parametrize("shape", [("b",), ("b", 17, "s"), ()])
def test_an_integer_of_another_rank_is_no_token_input_by_shape(shape: tuple[str | int, ...]) -> None:
    """A length or a frame of codes is not taken for tokens; the refusal names it."""
    found = refusal([Port("frame", "int64", shape)], [LOGITS])
    assert found.code == "E_NO_TOKEN_INPUT"
    assert "frame" in found.ports


@pytest.mark.parametrize("name", ["logits_Q4", "draft_logits", "out", "target_scores", "log_probs"])
def test_logits_go_by_other_names(name: str) -> None:
    """By the word in the name, or as the only float output of rank 3 that is no cache."""
    assert topology([TOKENS], [Port(name, "float32", ("b", "s", 1000))]).logits_output == name


def test_a_hidden_state_beside_the_logits_is_auxiliary() -> None:
    """The first rank-3 output is not the logits for being first."""
    hidden = Port("hidden_states", "float32", ("b", "s", 2048))
    found = topology([TOKENS], [hidden, Port("logits_Q4", "float32", ("b", "s", 1000))])
    assert found.logits_output == "logits_Q4"
    assert {port.name: port.role for port in found.roles}["hidden_states"] is Role.AUXILIARY


@pytest.mark.parametrize("name", ["last_hidden_state", "encoder_out", "sentence_embedding"])
def test_a_hidden_state_alone_is_no_logits(name: str) -> None:
    """A feature extractor with a cache has no logits, although its only float output is of rank 3."""
    found = refusal([TOKENS], [Port(name, "float32", ("b", "s", 1000))])
    assert found.code == "E_NO_LOGITS_OUTPUT"
    assert found.ports == (name,)


def test_an_output_as_wide_as_the_embeddings_is_no_logits() -> None:
    """A draft's hidden output has the width of its embeddings: argmax over it gives IDs that look valid."""
    embeds = Port("inputs_embeds", "float32", ("b", "s", 64))
    found = refusal([embeds], [Port("draft", "float32", ("b", "s", 64))])
    assert found.code == "E_NO_LOGITS_OUTPUT"
    assert found.ports == ("draft",)


def test_an_output_as_wide_as_the_embeddings_are_long_may_be_the_logits() -> None:
    """Only the last extent is a width: 256 tokens a call, and 256 bytes in the vocabulary."""
    embeds = Port("inputs_embeds", "float32", ("b", 256, 64))
    assert topology([embeds], [Port("scores", "float32", ("b", 256, 256))]).logits_output == "scores"


def test_an_input_named_after_the_logits_does_not_make_a_cache_of_them() -> None:
    """`prev_x` and `x` are a state by their names; the logits are what a decoder is for."""
    previous = Port("prev_logits", "float32", ("b", 1000))
    found = refusal([TOKENS, previous], [Port("logits", "float32", ("b", 1000))])
    assert (found.code, found.ports, found.also) == ("E_UNKNOWN_INPUT", ("prev_logits",), ())


def test_an_output_as_wide_as_a_state_is_no_logits() -> None:
    """The prediction network of a transducer gives its hidden width, and a joint network the logits."""
    # A prime, so that it is no number of heads together; `g` says nothing.
    state = (Port("state_h", "float32", (2, "b", 647)), Port("state_h_out", "float32", (2, "b", 647)))
    for name in ("decoder_output", "g"):
        found = refusal([TOKENS, state[0]], [Port(name, "float32", ("b", "s", 647)), state[1]])
        assert (found.code, found.ports) == ("E_NO_LOGITS_OUTPUT", (name,))


def test_two_candidates_for_the_logits_are_refused() -> None:
    """Nothing says which of two unnamed float outputs holds the scores."""
    outputs = [Port(name, "float32", ("b", "s", 1000)) for name in ("left", "right")]
    found = refusal([TOKENS], outputs)
    assert found.code == "E_NO_LOGITS_OUTPUT"
    assert found.ports == ("left", "right")


def scores(name: str, width: int | str, *, rank: int = 3) -> Port:
    """A float output with this last axis."""
    return Port(name, "float32", (*("b", "s")[: rank - 1], width))


def no_logits(*outputs: Port) -> Refusal:
    """The refusal of a decoder with these outputs, for want of logits, with the key to declare."""
    found = refusal([TOKENS], list(outputs))
    assert found.code == "E_NO_LOGITS_OUTPUT"
    assert "model.io.logits_output" in found.message
    return found


@given(
    name=st.sampled_from(["lm_logits", "token_logits", "logits_Q4", "draft_logits"]),
    width=st.integers(2, 200_000),
    rival=st.integers(2, 200_000),
    ranks=st.tuples(st.sampled_from([2, 3]), st.sampled_from([2, 3])),
    order=st.permutations([0, 1]),
)
def test_logits_by_a_word_of_their_name_have_no_rival_that_is_as_wide(
    name: str, width: int, rival: int, ranks: tuple[int, int], order: list[int]
) -> None:
    """A vocabulary is the widest thing that a decoder gives: only a narrower output leaves no doubt."""
    both = [scores(name, width, rank=ranks[0]), scores("output", rival, rank=ranks[1])]
    outputs = [both[i] for i in order]
    if rival < width:
        assert topology([TOKENS], outputs).logits_output == name
    else:
        assert set(no_logits(*outputs).ports) == {name, "output"}
    named = Port("logits", "float32", both[0].shape)
    assert topology([TOKENS], [both[1], named]).logits_output == "logits"


@pytest.mark.parametrize("other", sorted(_OTHER_SCORES))
def test_logits_of_another_kind_by_name_are_not_those_over_the_vocabulary(other: str) -> None:
    """Experts, stops, auxiliary losses and the like have logits as well, alone or beside those meant."""
    named = scores(f"{other}_logits", 8)
    assert no_logits(named).ports == (named.name,)
    assert no_logits(scores(other, 8)).ports == (other,)
    assert set(no_logits(named, scores("output", 32_000)).ports) == {named.name, "output"}
    assert topology([TOKENS], [LOGITS, named]).logits_output == "logits"


@pytest.mark.parametrize("name", ["score", "rewards", "left", "stop_token_logits", "lm_logits", "log_probs"])
@pytest.mark.parametrize("shape", [("b", 1), ("b", "s", 1), ("b", "s", 0), ("b", "s")])
def test_one_number_for_each_row_or_token_is_over_no_vocabulary(
    name: str, shape: tuple[str | int, ...]
) -> None:
    """Rewards, values and stops: the argmax over such an axis is no token, whatever the output is called."""
    assert no_logits(Port(name, "float32", shape)).ports == (name,)


@pytest.mark.parametrize("name", ["out", "lm_logits", "scores"])
@pytest.mark.parametrize("shape", [("b", "vocab"), ("b", "s", "vocab_size"), ("b", 1, "padded_vocab")])
def test_a_symbol_may_say_that_an_axis_is_the_vocabulary(name: str, shape: tuple[str | int, ...]) -> None:
    """An exporter that leaves the extent open and names it has said what it is."""
    assert topology([TOKENS], [Port(name, "float32", shape)]).logits_output == name


@given(
    heads=st.integers(1, 32),
    width=st.integers(2, 256),
    queries=st.integers(1, 128),
    transposed=st.booleans(),
    rank=st.sampled_from([2, 3]),
)
def test_a_nameless_output_as_wide_as_heads_of_attention_is_no_logits(
    heads: int, width: int, queries: int, transposed: bool, rank: int
) -> None:
    """Hidden states are as wide as some heads together, not always those of the queries.

    256 is the vocabulary of bytes, unless it is just the width of one KV head or of all.
    """

    def cache(name: str, length: str) -> Port:
        return Port(name, "float32", ("b", heads, *((width, length) if transposed else (length, width))))

    def resolved(*outputs: Port) -> Derivation:
        inputs = (TOKENS, cache("past_key_values.0.key", "past"))
        return resolve(PortInventory(inputs, (*outputs, cache("present.0.key", "total"))))

    extent = queries * width
    if extent <= 16_384 and (extent != 256 or 256 in (width, heads * width)):
        found = resolved(scores("output", extent, rank=rank)).refusal
        assert found is not None
        assert (found.code, found.ports) == ("E_NO_LOGITS_OUTPUT", ("output",))
    for certain in (scores("lm_logits", extent), scores("scores", extent), scores("output", 20_000 * width)):
        told = resolved(certain).topology
        assert told is not None
        assert told.logits_output == certain.name


@pytest.mark.parametrize(("heads", "found"), [(2, True), (16, False)])
def test_bytes_are_a_vocabulary_where_attention_is_not_as_wide(heads: int, found: bool) -> None:
    """256 is eight heads for each of two, as in a toy of default names; or all 16 of 16, a hidden state."""
    past, present = (
        Port(f"{side}.0.key", "float32", ("b", heads, length, 16))
        for side, length in (("past_key_values", "p"), ("present", "t"))
    )
    derivation = resolve(PortInventory((TOKENS, past), (scores("linear_14", 256), present)))
    assert (derivation.topology is not None) is found


def test_heads_of_one_number_say_nothing_of_widths() -> None:
    """Every width is some of them."""
    past, present = (
        Port(f"{side}.0.key", "float32", ("b", 1, length, 1))
        for side, length in (("past_key_values", "p"), ("present", "t"))
    )
    found = resolve(PortInventory((TOKENS, past), (scores("output", 1000), present))).topology
    assert found is not None
    assert found.logits_output == "output"


@pytest.mark.parametrize("part", sorted(_PART_WORDS))
def test_what_a_part_of_the_network_gives_is_no_logits_by_itself(part: str) -> None:
    """A predictor's output feeds a joiner; what is wider than any hidden state can only be scores."""
    assert no_logits(scores(f"{part}_out", 1_000)).ports == (f"{part}_out",)
    assert no_logits(scores(f"{part}_out", 16_384)).ports == (f"{part}_out",)
    assert topology([TOKENS], [scores(f"{part}_out", 51_865)]).logits_output == f"{part}_out"
    assert topology([TOKENS], [scores(f"{part}_logits", 1_000)]).logits_output == f"{part}_logits"


def test_a_nameless_output_of_unknown_width_is_no_logits() -> None:
    """Nothing says that it is over a vocabulary."""
    assert no_logits(scores("output", "d")).ports == ("output",)


def test_an_output_as_wide_as_the_encoder_is_no_logits() -> None:
    """It may be what the decoder makes of the encoder's states."""
    encoder = Port("encoder_hidden_states", "float32", ("b", "e", 1000))
    found = refusal([TOKENS, encoder], [scores("out", 1000)])
    assert (found.code, found.ports) == ("E_NO_LOGITS_OUTPUT", ("out",))


def test_a_wide_hidden_state_is_no_rival_of_the_logits() -> None:
    """By its name it is something else: a small vocabulary may stand beside it."""
    outputs = [scores("hidden_states", 2048), scores("audio_logits", 1025)]
    assert topology([TOKENS], outputs).logits_output == "audio_logits"


@pytest.mark.parametrize("shape", [("b", 4, "s", 1000), (1000,), ()])
def test_logits_of_another_rank_make_the_only_other_output_doubtful(shape: tuple[str | int, ...]) -> None:
    """The name says that they are the logits, and the rank that nobody knows how to read them."""
    found = no_logits(scores("base", 1000), Port("medusa_logits", "float32", shape))
    assert set(found.ports) == {"base", "medusa_logits"}


@pytest.mark.parametrize("port", [Port("count", "int64", ("b",)), Port("losses", "float32", ("b",))])
def test_what_cannot_be_logits_and_has_no_such_name_leaves_no_doubt(port: Port) -> None:
    """Only a name that says logits makes an output of another kind a rival."""
    assert topology([TOKENS], [scores("base", 1000), port]).logits_output == "base"


def test_the_case_of_ascii_letters_does_not_count_and_that_of_others_does() -> None:
    """The sign of kelvin is k in lower case, and another letter."""
    assert words("Input_IDS.0") == {"input", "ids"}
    assert words("past_\u212a") == {"past", "\u212a"}


@pytest.mark.parametrize("shape", [("b", "s"), (3, "b", "s"), (1, 2, "s")])
def test_positions_may_have_three_axes(shape: tuple[str | int, ...]) -> None:
    """Multimodal rotary embeddings take three rows of positions, ChatGLM two."""
    positions = Port("position_ids", "int64", shape)
    assert topology([TOKENS, positions], [LOGITS]).position_ids_input == "position_ids"


def test_a_second_mask_or_position_input_is_unknown() -> None:
    """One port has each of these roles; another of nearly the same name is not quietly the same thing."""
    for name in ("q_position_ids", "sliding_attention_mask"):
        positions = [Port("position_ids", "int64", ("b", "s")), Port("attention_mask", "int64", ("b", "t"))]
        found = refusal([TOKENS, *positions, Port(name, "int64", ("b", "s"))], [LOGITS])
        assert (found.code, found.ports) == ("E_UNKNOWN_INPUT", (name,))


@pytest.mark.parametrize(
    ("port", "role"),
    [
        (Port("use_cache_branch", "bool", (1,)), Role.CONTROL),
        (Port("seqlens_k", "int32", ("b", 1)), Role.CONTROL),
        (Port("total_seq_len", "int32", ()), Role.CONTROL),
        (Port("past_key_values_length", "int64", (1,)), Role.CONTROL),
        (Port("encoder_hidden_states", "float32", ("b", "e", 64)), Role.ENCODER_HIDDEN_STATES),
        (Port("encoder_attention_mask", "int64", ("b", "e")), Role.ENCODER_ATTENTION_MASK),
        (Port("deepstack_embeds", "float32", (1, "b", "s", 64)), Role.OPTIONAL),
        (Port("per_layer_inputs", "float32", ("b", "s", 6, 16)), Role.AUXILIARY),
    ],
    ids=lambda value: value.name if isinstance(value, Port) else str(value),
)
def test_other_inputs_have_roles_by_name(port: Port, role: Role) -> None:
    """Each known name has its role, and the token input is not disturbed by it."""
    found = topology([TOKENS, port], [LOGITS])
    assert {one.name: one.role for one in found.roles}[port.name] is role
    assert found.token_input == "input_ids"


def test_an_input_that_nobody_knows_is_refused_and_never_ignored() -> None:
    """The refusal names it, and the keys that would place it."""
    found = refusal([TOKENS, Port("speaker", "float32", ("b", 256))], [LOGITS])
    assert (found.code, found.ports) == ("E_UNKNOWN_INPUT", ("speaker",))
    assert "model.io" in found.message


def test_a_name_with_the_wrong_dtype_does_not_count() -> None:
    """`input_ids` of floats is not the token input, whatever it is called."""
    found = refusal([Port("input_ids", "float32", ("b", "s"))], [LOGITS])
    assert found.code == "E_NO_TOKEN_INPUT"


def test_an_input_passed_through_is_an_auxiliary_output() -> None:
    """A graph may give an input back under the same name: two ports, and only the input is the mask."""
    mask = Port("attention_mask", "int64", ("b", "t"))
    found = topology([TOKENS, mask], [LOGITS, mask])
    roles = [(port.direction, port.role) for port in found.roles if port.name == "attention_mask"]
    assert roles == [("input", Role.ATTENTION_MASK), ("output", Role.AUXILIARY)]
    assert found.attention_mask_input == "attention_mask"
