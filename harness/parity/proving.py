"""What an oracle must show before it is trusted: the precision in which its own kernels compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.engines.base import ProvingSession, Session
from harness.errors import InvalidRunError

__all__ = ["proof_of", "require_proof"]


def proof_of(session: Session) -> Mapping[str, Any] | None:
    """What a session shows; None for engines that offer no proof."""
    return session.proof() if isinstance(session, ProvingSession) else None


def require_proof(proof: Mapping[str, Any] | None) -> None:
    """Refuse an oracle whose proof failed. One that has none, or where nothing could be asked, stays.

    Raises:
        InvalidRunError: naming the node, its error, and the bound; or the weight that is not finite.
    """
    if proof is None or proof["passed"] is not False:
        return
    failed = [entry for entry in proof["entries"] if not entry["passed"]]
    worst = failed[0]
    error, bound, reason = worst["max_error"], worst["bound"], worst.get("reason")
    if reason is not None:
        raise InvalidRunError(
            f"No result of this model proves anything: {worst['operator']} {worst['node']} has no sum that "
            f"could be known, as {reason}.",
            next_action="Export the model again, with weights that are all finite.",
        )
    off = "gives NaN or infinity instead of" if error is None else f"is off by {error:.2e} from"
    allowed = "gives no finite bound" if bound is None else f"allows {bound:.2e}"
    more = f" (and {len(failed) - 1} more kinds of node fail)" if len(failed) > 1 else ""
    raise InvalidRunError(
        f"The oracle's proof failed: {worst['operator']} {worst['node']} {off} a known sum, where "
        f"{proof['precision']} {allowed}{more}.",
        next_action="Do not trust this oracle with this model: name another with --oracle, and report what "
        "oracle.proof of the report shows.",
    )
