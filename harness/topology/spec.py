"""The vocabulary of topologies: what a port can be, and how it came to be known.

Field names of `Topology` are those of the `io` block of ONNX inference metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from harness.ports import PortInventory

__all__ = [
    "REFUSAL_CODES",
    "Derivation",
    "Gate",
    "Outcome",
    "PortRole",
    "Refusal",
    "Role",
    "StatePair",
    "Topology",
]

REFUSAL_CODES: tuple[str, ...] = (
    "E_MALFORMED_PORT",
    "E_DUPLICATE_PORT",
    "E_DECLARED_PORT_MISSING",
    "E_ROLE_OVERLAP",
    "E_UNSUPPORTED_LAYOUT_PAGED",
    "E_NO_TOKEN_INPUT",
    "E_AMBIGUOUS_TOKEN_INPUT",
    "E_NO_LOGITS_OUTPUT",
    "E_PRESENT_WITHOUT_PAST",
    "E_LAYER_ID_MISMATCH",
    "E_UNPAIRED_PAST",
    "E_AMBIGUOUS_STATE_PAIRING",
    "E_DTYPE_MISMATCH",
    "E_SHAPE_MISMATCH",
    "E_STATE_DYNAMIC_DIM",
    "E_INCOMPLETE_CONTROL_PORTS",
    "E_EVIDENCE_CONFLICT",
    "E_UNKNOWN_INPUT",
    "E_NO_CACHE",
)
"""Refusal codes in order of precedence: the first that applies is the refusal's `code`."""


class Role(StrEnum):
    """What one port of a decoder graph is for."""

    TOKEN = "token"
    EMBEDS = "embeds"
    ATTENTION_MASK = "attention_mask"
    POSITION_IDS = "position_ids"
    LOGITS = "logits"
    KV_KEY = "kv_key"
    KV_VALUE = "kv_value"
    KV_FUSED = "kv_fused"
    KV_SCALE = "kv_scale"
    STATE = "state"
    CROSS_KV_KEY = "cross_kv_key"
    CROSS_KV_VALUE = "cross_kv_value"
    ENCODER_HIDDEN_STATES = "encoder_hidden_states"
    ENCODER_ATTENTION_MASK = "encoder_attention_mask"
    CONTROL = "control"
    OPTIONAL = "optional"
    AUXILIARY = "auxiliary"


class Gate(StrEnum):
    """When names are looked at: always, or only to find recurrent states that nothing declares."""

    DEFAULT = "default"
    RECURRENT_ONLY = "recurrent-only"


class Outcome(StrEnum):
    """How a topology came about."""

    DERIVED = "derived"
    DECLARED = "declared"
    DECLINED = "declined"
    REFUSED = "refused"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class PortRole:
    """The role of one port, with the evidence for it.

    Attributes:
        name: the port.
        direction: `input` or `output`.
        role: what it is for.
        pair: the partner port of a past/present pair, None for a port that has none.
        layer: the layer index in its name, None where it has none.
        because: the evidence, one line.
    """

    name: str
    direction: Literal["input", "output"]
    role: Role
    because: str
    pair: str | None = None
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class StatePair:
    """A recurrent state: the port that takes it and the port that gives its next value."""

    input: str
    output: str
    init: str = "zeros"
    update: str = "replace"


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What is known about a graph's inputs beyond their ports: from its nodes, or from its configuration.

    Attributes:
        extents: concrete extents of axes that the ports leave open, by input and axis.
        row_axes: the axis along which rows are written into a buffer of fixed size, by input.
        windows: how many rows a query sees of a cache in which new rows replace the oldest, by input.
        last_token_indices: inputs that are read as the index of the last token, whatever they are called.
    """

    extents: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    row_axes: Mapping[str, int] = field(default_factory=dict)
    windows: Mapping[str, int] = field(default_factory=dict)
    last_token_indices: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Topology:
    """The I/O topology of a decoder graph: the `io` block, and the role of every port.

    `kv_inputs[i]` is the past port of the present port `kv_outputs[i]`; the same holds for
    `cross_kv_inputs` and `cross_kv_outputs` where the graph gives cross-attention KV back. `inventory` has
    the ports as they were given, since a runtime may name their symbols anew; None where there were none.
    """

    token_input: str | None = None
    inputs_embeds_input: str | None = None
    attention_mask_input: str | None = None
    position_ids_input: str | None = None
    logits_output: str | None = None
    kv_inputs: tuple[str, ...] = ()
    kv_outputs: tuple[str, ...] = ()
    state_pairs: tuple[StatePair, ...] = ()
    cross_kv_inputs: tuple[str, ...] = ()
    cross_kv_outputs: tuple[str, ...] = ()
    encoder_hidden_states_input: str | None = None
    static_cache: Mapping[str, Any] | None = None
    optional_inputs: tuple[str, ...] = ()
    roles: tuple[PortRole, ...] = field(default=(), repr=False)
    facts: GraphFacts = field(default=GraphFacts(), repr=False, compare=False)
    inventory: PortInventory | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the ports do not settle the topology, and what to declare so that they do.

    Attributes:
        code: one of `REFUSAL_CODES`, the first that applies.
        message: what is wrong with which port, the rule, and the key to declare.
        ports: the ports concerned.
        also: further codes that apply.
    """

    code: str
    message: str
    ports: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Derivation:
    """The answer of a derivation: a topology (derived, declared) or a refusal (declined, refused).

    `warnings` are sentences on what the package declares: it stands, and something speaks against it.
    """

    outcome: Outcome
    topology: Topology | None = None
    refusal: Refusal | None = None
    warnings: tuple[str, ...] = ()
