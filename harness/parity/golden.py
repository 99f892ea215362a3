"""Goldens: the tokens that a model is known to give, with where that is known from.

A golden decides only about the very model that it was recorded on. One that does not say which model that was
is advisory: what it holds is shown, and decides nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.decode.trace import TraceFailure
from harness.errors import EngineFailedError, InputError
from harness.json_keys import unique_keys
from harness.parity.candidate import CandidateSide, Prompt
from harness.parity.recorded import canonical_sha256, tensor_sha256
from harness.parity.verdict import Verdict
from harness.report.document import token_sha256
from harness.report.writer import write_json_atomically

__all__ = [
    "SCHEMA",
    "Golden",
    "GoldenPrompt",
    "GoldenResult",
    "compare_with_golden",
    "inputs_sha256",
    "read_golden",
    "write_golden",
]

SCHEMA = "onnx-parity/golden/1"

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenPrompt:
    """A prompt and what must follow it.

    Attributes:
        text: what it reads as; None where only its IDs are known.
        prompt_ids: its token IDs, of the source text for a text encoder; None where only its text is known.
        inputs_sha256: over what encoders were fed with it; None where they were fed nothing.
        token_ids: what must follow, at least one.
    """

    text: str | None
    prompt_ids: tuple[int, ...] | None
    inputs_sha256: str | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """Expected tokens of one model.

    Attributes:
        model: what the model is called.
        sha256: its hash, as `harness.package.model_sha256`; None where nobody knows it.
        provenance: who found these tokens out, how and when; plain data.
        prompts: at least one.
    """

    model: str
    sha256: str | None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    prompts: Sequence[GoldenPrompt]

    @property
    def advisory(self) -> bool:
        """Whether it decides nothing, as nobody knows which model it is of."""
        return self.sha256 is None

    def require_same_model(self, sha256: str, *, package: str) -> None:
        """Refuse a golden of another model; one that is advisory is of none.

        Raises:
            InputError: naming both hashes.
        """
        if self.sha256 is not None and self.sha256 != sha256:
            raise InputError(
                f"The golden is of another model than {package}: its sha256 is {self.sha256:.12} "
                f"({self.model}), and not {sha256:.12}.",
                next_action="Name the package that it was recorded on, or record one of this model with "
                "`onnx-parity golden record`.",
            )


@dataclass(frozen=True, slots=True)
class GoldenResult:
    """What an engine gave where a golden says what it must give.

    Attributes:
        verdict: `identical` or `divergent`, or how the engine failed.
        token_ids: what it gave, no more than is expected.
        first_difference: the first index at which it is not as expected; None where all of it is.
        failure: how the engine failed; None where it did not.
    """

    verdict: Verdict
    token_ids: tuple[int, ...]
    first_difference: int | None
    failure: EngineFailedError | TraceFailure | None = None


def compare_with_golden(candidate: CandidateSide, prompt: Prompt, expected: Sequence[int]) -> GoldenResult:
    """Decode a prompt: every token must be the expected one.

    Args:
        candidate: decodes at least as many tokens as are expected.
        prompt: what to continue.
        expected: the tokens of the golden.

    Raises:
        NotDrivableError, InputError: as `harness.decode.loop.greedy_decode`.
    """
    failure: EngineFailedError | TraceFailure | None
    try:
        trace = candidate.decode(prompt)
        found, failure = trace.token_ids[: len(expected)], trace.failure
    except EngineFailedError as error:
        found, failure = (), error
    pairs = zip(expected, found, strict=False)
    first = next((i for i, (wanted, given) in enumerate(pairs) if wanted != given), None)
    if first is None and len(found) < len(expected):
        first = len(found)
    if failure is not None and len(found) < len(expected):
        return GoldenResult(Verdict(failure.kind), found, first, failure)
    return GoldenResult(Verdict.IDENTICAL if first is None else Verdict.DIVERGENT, found, first)


def inputs_sha256(prompt: Prompt) -> str | None:
    """SHA-256 over what encoders are fed with a prompt, in hex; None where they are fed nothing."""
    import numpy as np

    if not prompt.extra:
        return None
    return canonical_sha256({port: tensor_sha256(np.asarray(value)) for port, value in prompt.extra.items()})


def write_golden(path: Path, golden: Golden) -> None:
    """Write a golden to `path`, in one step.

    Raises:
        InputError: the place cannot be written to.
    """
    document = {
        "schema": SCHEMA,
        "model": {"name": golden.model, "sha256": golden.sha256},
        "provenance": dict(golden.provenance),
        "prompts": [
            {
                "text": each.text,
                "prompt_ids": None if each.prompt_ids is None else list(each.prompt_ids),
                "inputs_sha256": each.inputs_sha256,
                "token_ids": list(each.token_ids),
                "token_sha256": token_sha256(each.token_ids),
            }
            for each in golden.prompts
        ],
    }
    try:
        write_json_atomically(path, document)
    except OSError as error:
        raise InputError(
            f"{path}: the golden cannot be written: {error.strerror or error}.",
            next_action="Choose another place with -o.",
        ) from error


def read_golden(path: Path) -> Golden:
    """Read what `write_golden` wrote, or what was written by hand in its form.

    Raises:
        InputError: it cannot be read, has another form or version, or its tokens are not those of its hash.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise _misfit(path, f"cannot be read as JSON: {reason}") from error
    if not isinstance(document, dict) or not isinstance(schema := document.get("schema"), str):
        raise _misfit(path, f"has no schema; a golden has {SCHEMA}")
    if schema != SCHEMA:
        kind, _, number = schema.rpartition("/")
        newer = kind == SCHEMA.rpartition("/")[0] and number.isascii() and number.isdigit()
        raise _misfit(
            path,
            f"has the schema {schema!r:.60}; this onnx-parity reads {SCHEMA}",
            "Update onnx-parity." if newer else None,
        )
    try:
        model, prompts = document["model"], document["prompts"]
        sha256 = model["sha256"]
        if not isinstance(model["name"], str) or not isinstance(document["provenance"], dict):
            raise _misfit(path, "has a model without a name, or a provenance that is no mapping")
        if sha256 is not None and not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
            raise _misfit(path, f"has {sha256!r:.80} as the sha256 of its model, which is none")
        if not isinstance(prompts, list) or not prompts:
            raise _misfit(path, "has no prompt")
        return Golden(
            model=model["name"],
            sha256=sha256,
            provenance=document["provenance"],
            prompts=tuple(_prompt(path, number, each) for number, each in enumerate(prompts, 1)),
        )
    except KeyError as error:
        raise _misfit(path, f"lacks {error.args[0]!r}") from error
    except TypeError as error:
        raise _misfit(path, "has another form than a golden") from error


def _prompt(path: Path, number: int, value: Mapping[str, Any]) -> GoldenPrompt:
    text, ids, inputs, tokens = (value[key] for key in ("text", "prompt_ids", "inputs_sha256", "token_ids"))
    if not _are_ids(tokens) or not (ids is None or _are_ids(ids)):
        raise _misfit(path, f"has token IDs of prompt {number} that are no list of whole numbers")
    if not (text is None or isinstance(text, str)) or (text is None and ids is None):
        raise _misfit(path, f"has neither text nor IDs of prompt {number}")
    if not (inputs is None or isinstance(inputs, str)):
        raise _misfit(path, f"has an inputs_sha256 of prompt {number} that is no text")
    if value["token_sha256"] != token_sha256(tokens):
        raise _misfit(path, f"was changed: the tokens of prompt {number} are not those of token_sha256")
    return GoldenPrompt(
        text=text,
        prompt_ids=None if ids is None else tuple(ids),
        inputs_sha256=inputs,
        token_ids=tuple(tokens),
    )


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int and 0 <= i < 1 << 63 for i in value)


def _misfit(path: Path, what: str, action: str | None = None) -> InputError:
    return InputError(
        f"{path}: the golden {what}.",
        next_action=action or "Name a file that `onnx-parity golden record` wrote.",
    )
