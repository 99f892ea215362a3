"""Caches of fixed size that the graph writes in place: buffers, and the two ports that say where.

The write index says where this call's tokens go, the valid length how many slots count afterwards. Both
are integer vectors of one shape, so only their names (or a declaration) tell them apart. The fields are
those of `static_cache` in the `io` block of ONNX inference metadata.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.topology.acceptance import CacheBinding
from harness.topology.conventions import Discipline
from harness.topology.findings import Finding, listed
from harness.topology.placement import Placement
from harness.topology.shapes import growing_axes
from harness.topology.spec import Role

__all__ = ["VALID_LENGTH_NAMES", "WRITE_INDEX_NAMES", "buffer_lists", "is_scatter", "place_static_cache"]

WRITE_INDEX_NAMES = frozenset({"write_indices", "write_index", "write_positions", "write_position"})
VALID_LENGTH_NAMES = frozenset({"nonpad_kv_seqlen", "kv_sequence_length", "kv_seqlen", "valid_kv_length"})


def is_scatter(binding: CacheBinding) -> bool:
    """True for a buffer that is written in place, False for one that is seen to grow after all."""
    if binding.discipline is not Discipline.SCATTER or binding.present is None:
        return False
    axes = growing_axes(binding.past.shape, binding.present.shape)
    return len(axes) != 1 or isinstance(axes[0].before, int)


def place_static_cache(placement: Placement, bindings: Sequence[CacheBinding]) -> None:
    """Find the control ports of the scatter buffers among `bindings`, if there are any.

    Without either control port the cache cannot be driven, which is a finding.
    """
    buffers = [binding for binding in bindings if is_scatter(binding)]
    if not buffers:
        return
    names = [port.name for port in placement.inventory.inputs]
    write_index = [name for name in names if name in WRITE_INDEX_NAMES]
    valid_length = [name for name in names if name in VALID_LENGTH_NAMES]
    lacking = [
        what
        for what, found in (("a write index", write_index), ("a valid length", valid_length))
        if len(found) != 1
    ]
    if lacking:
        caches = [binding.past.name for binding in buffers]
        placement.findings.append(
            Finding(
                "E_INCOMPLETE_CONTROL_PORTS",
                f"{listed(caches)} are buffers of fixed size, and the graph lacks {' and '.join(lacking)}. "
                "Declare model.io.static_cache, or export the graph again.",
                (*caches, *write_index, *valid_length),
            )
        )
        return
    for name, because in (
        (write_index[0], "where this call's tokens are written in the static cache"),
        (valid_length[0], "how many slots of the static cache count after this call"),
    ):
        if name not in placement.inputs:
            placement.place(name, "input", Role.CONTROL, because)
    placement.static_cache = {
        "write_indices_input": write_index[0],
        "kv_sequence_length_input": valid_length[0],
        **buffer_lists(buffers),
    }


def buffer_lists(buffers: Sequence[CacheBinding]) -> dict[str, list[str]]:
    """The four lists of buffer ports, in the order of `buffers`."""
    lists: dict[str, list[str]] = {}
    for kind, role in (("key", Role.KV_KEY), ("value", Role.KV_VALUE)):
        pairs = [
            (binding.past.name, binding.present.name)
            for binding in buffers
            if binding.role is role and binding.present is not None
        ]
        lists[f"{kind}_cache_inputs"] = [past for past, _ in pairs]
        lists[f"{kind}_cache_outputs"] = [present for _, present in pairs]
    return lists
