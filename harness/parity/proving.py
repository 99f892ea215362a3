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
        InvalidRunError: naming the node, its error, and the bound.
    """
    if proof is None or proof["passed"] is not False:
        return
    failed = [entry for entry in proof["entries"] if not entry["passed"]]
    worst = failed[0]
    error = worst["max_error"]
    off = "gives what is no number" if error is None else f"is off by {error:.2e}"
    more = f" (and {len(failed) - 1} more kinds of node fail)" if len(failed) > 1 else ""
    raise InvalidRunError(
        f"The oracle's proof failed: {worst['operator']} {worst['node']} {off} from a known sum, where "
        f"{proof['precision']} allows {worst['bound']:.2e}{more}.",
        next_action="Do not trust this oracle with this model: name another with --oracle, and report what "
        "oracle.proof of the report shows.",
    )
