"""The source's side of a check: what the model that was exported says of the candidate's tokens.

One pass over prompt and tokens is all that an attribution needs. Where the source differs from the oracle it
is run again in its other precision: what either has in common with the oracle is no difference, and how far
they are apart is what rounding may explain. A source model rounds to float32 in places whatever its type, so
that its float64 is no finer than the spread of the two.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.decode.loop import one_pass_decode
from harness.decode.trace import Trace
from harness.engines.base import Session, SessionInfo
from harness.engines.registry import EngineSpec
from harness.errors import EngineFailedError, InputError, InvalidRunError
from harness.parity.attribution import SourceComparison, compare_with_source
from harness.parity.reference import ReferenceTrace
from harness.parity.spread import SPREAD_FACTOR, spread_between
from harness.parity.verdict import Verdict
from harness.topology.spec import Topology

__all__ = ["SourceModel", "SourcePlan", "rounding_bands"]

_OTHER = {"float32": "float64", "float64": "float32"}
_FINEST = "float64"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlan:
    """The model that a package was exported from.

    Attributes:
        spec: what runs it: an engine that opens such a folder, with one input for token IDs and one output
            for the logits of every position.
        folder: where it lies.
        vocabulary: how many tokens the package's decoder knows; None where that is not known.
    """

    spec: EngineSpec
    folder: Path
    vocabulary: int | None


def rounding_bands(reference: ReferenceTrace, *, source: float | None = None) -> list[float]:
    """At each position, which gap between oracle and source rounding on either side may explain.

    Args:
        reference: of the oracle, along the same tokens.
        source: the source's part of it: twice its spread, times the factor. None where nothing shows how it
            rounds, as for a recorded decode: then as the oracle does in float32, which computes the same.
    """
    ours = [max(reference.rounding, band) for band in reference.bands]
    return [band + (band if source is None else source) for band in ours]


class SourceModel:
    """Says what the source chooses along given tokens, and compares it with the oracle."""

    def __init__(self, plan: SourcePlan, *, top_k: int) -> None:
        """Load the model in the precision asked for.

        Raises:
            InputError: the folder is no model, or that of another one; or the engine cannot run it.
            InvalidRunError: the engine failed while it was loaded.
            EngineUnavailableError: as `harness.engines.base.Engine.open`.
        """
        self._plan = plan
        self._top_k = top_k
        began = time.perf_counter()
        self._session = self._open(plan.spec)
        self.seconds = time.perf_counter() - began
        tokens, logits = self._session.inventory.inputs[0], self._session.inventory.outputs[0]
        self._topology = Topology(token_input=tokens.name, logits_output=logits.name)
        self._precision = str(self._session.info.settings.get("precision", ""))
        self._sessions = {self._precision: self._session}
        self._failed: set[str] = set()
        known = logits.shape[-1] if logits.shape else None
        if plan.vocabulary is not None and known != plan.vocabulary:
            self.close()
            raise InputError(
                f"{plan.folder} knows {known} tokens, and the package has logits for {plan.vocabulary}: it "
                "is not what the package was exported from.",
                next_action="Name the folder of the model that was exported.",
            )

    @property
    def info(self) -> SessionInfo:
        """What runs and how."""
        return self._session.info

    def along(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Trace:
        """The source's logits along `token_ids`, in one pass.

        Raises:
            InvalidRunError: the source failed, or its logits hold NaN.
        """
        return self._pass(self._session, prompt_ids, token_ids)

    def compare(self, own: Trace, reference: ReferenceTrace) -> SourceComparison:
        """Compare the source with the oracle along the same tokens.

        Args:
            own: as `along` gives it.
            reference: of the oracle, which was told of the source's choices as of rivals.

        Raises:
            InvalidRunError: as `along`.
        """
        oracle = reference.trace
        found = compare_with_source(oracle, own)
        if found.verdict is Verdict.IDENTICAL:
            return found
        again = self._again(own)
        if again is None:
            return compare_with_source(oracle, own, bands=rounding_bands(reference))
        spread = 2 * SPREAD_FACTOR * spread_between(own, again)
        finest, coarse = (own, again) if self._precision == _FINEST else (again, own)
        steps = tuple(
            rough if rough.argmax == theirs.argmax else fine
            for rough, fine, theirs in zip(coarse.steps, finest.steps, oracle.steps, strict=True)
        )
        settled = replace(own, steps=steps, seconds=own.seconds + again.seconds)
        return compare_with_source(oracle, settled, bands=rounding_bands(reference, source=spread))

    def close(self) -> None:
        """Free every session. May be called twice."""
        for session in self._sessions.values():
            session.close()

    def _again(self, own: Trace) -> Trace | None:
        """The same in the other precision; None where the engine has none, or the model does not run in it.

        Some have operators for float32 alone, and some no room for float64.
        """
        precision = _OTHER.get(self._precision)
        if (
            precision is None
            or "precision" not in self._plan.spec.engine.options
            or precision in self._failed
        ):
            return None
        try:
            if precision not in self._sessions:
                spec = self._plan.spec
                options = {**spec.options, "precision": precision}
                self._sessions[precision] = replace(spec, options=options).open(self._plan.folder)
            return self._pass(self._sessions[precision], own.prompt_ids, own.token_ids)
        except (EngineFailedError, InvalidRunError):
            self._failed.add(precision)
            return None

    def _open(self, spec: EngineSpec) -> Session:
        try:
            return spec.open(self._plan.folder)
        except EngineFailedError as error:
            if error.kind == "unsupported":
                raise InputError(error.message, next_action=error.next_action) from error
            raise InvalidRunError(
                f"The source model could not be loaded, so nothing can be attributed: {error.message}",
                next_action=error.next_action,
            ) from error

    def _pass(self, session: Session, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Trace:
        trace = one_pass_decode(session, self._topology, prompt_ids, token_ids, top_k=self._top_k)
        if trace is None:
            raise InvalidRunError(
                f"{session.info.engine} gave logits that are not those of every position.",
                next_action="Leave --source out, or name another engine for it.",
            )
        if trace.failure is not None:
            raise InvalidRunError(
                f"The source model failed: {trace.failure.message}",
                next_action="Leave --source out, or see that the model runs by itself.",
            )
        for position, step in enumerate(trace.steps):
            if step.has_nan or not math.isfinite(step.values[0]):
                raise InvalidRunError(
                    f"The source model's logits are not finite at generated position {position}: such a "
                    "source proves nothing.",
                    next_action="Check the weights of the source, or leave --source out.",
                )
        return trace
