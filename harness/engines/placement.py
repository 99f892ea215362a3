"""`--strict-placement`: nothing may run on the CPU, whatever it computes."""

from __future__ import annotations

from harness.engines.base import SessionInfo
from harness.engines.ort_placement import CPU_PROVIDER
from harness.errors import InvalidRunError

__all__ = ["require_off_cpu"]


def require_off_cpu(info: SessionInfo) -> None:
    """Check that an engine placed its nodes, and none of them on the CPU.

    Stricter than what engines on a device require of themselves, which leaves shape arithmetic where the
    runtime puts it. An engine that says nothing about placement has not shown that it kept off the CPU.

    Raises:
        InvalidRunError: naming the nodes on the CPU by operator, or that there is no placement to look at.
    """
    providers = (info.placement or {}).get("providers", {})
    if not any(providers.values()):
        raise InvalidRunError(
            f"--strict-placement: {info.engine} does not say where its nodes run.",
            next_action="Leave the option out, or use an engine that records placement, such as ort-cuda.",
        )
    on_cpu = providers.get(CPU_PROVIDER, {})
    if on_cpu:
        listed = ", ".join(f"{count} {operator}" for operator, count in on_cpu.items())
        raise InvalidRunError(
            f"--strict-placement: {info.engine} ran nodes on {CPU_PROVIDER}: {listed}.",
            next_action="Export the model without them, or leave the option out: it allows shape arithmetic.",
        )
