"""Read trace files: whatever was changed in one since it was written is found and named.

A hash is no signature: of someone who writes every hash anew, only what contradicts itself is found (tokens
that the logits did not choose, logits in no order, a tensor that is not what is said of it), and what another
model says of them.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.decode.trace import Trace, TraceFailure
from harness.engines.answers import may_follow
from harness.engines.base import SessionInfo, TopLogits
from harness.engines.tensor_types import is_native, numpy_dtype
from harness.errors import EngineFailedError, FailureDetails
from harness.json_keys import unique_keys
from harness.parity.candidate import Prompt
from harness.parity.recorded import (
    RecordedDecode,
    RecordedEngine,
    RecordedModel,
    RecordedPrompt,
    RecordedTensor,
    Recording,
    tensor_sha256,
)
from harness.parity.trace_values import Value, misfit
from harness.parity.trace_writing import FORMAT, VERSION

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from safetensors import safe_open

__all__ = ["read_trace"]

_KINDS = ("crashed", "timeout", "unsupported")


def read_trace(path: Path) -> Recording:
    """Read what `write_trace` wrote; caches and states that were kept whole stay in the file.

    Raises:
        InputError: it is no trace, or one of another version; it was changed after it was written, or
            contradicts itself. The message names the part.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        what = "is no regular file" if path.exists() else "does not exist"
        raise misfit(path, what, "Name a file that onnx-parity record wrote.")
    try:
        with safe_open(path, framework="np") as opened:
            return _Reader(path, opened).recording()
    except SafetensorError as error:
        raise misfit(path, f"is damaged, or no trace: {' '.join(str(error).split())}") from error
    except OSError as error:
        raise misfit(path, f"cannot be read: {error.strerror or error}") from error


class _Reader:
    """Reads one open file; `path` is for messages."""

    def __init__(self, path: Path, opened: safe_open) -> None:
        self._path = path
        self._opened = opened
        self._arrays: dict[str, NDArray[Any]] = {}
        self._listed: dict[str, Any] = {}

    def recording(self) -> Recording:
        """All of it, checked."""
        document = self._document()
        self._listed = document["tensors"].mapping()
        self._check_tensors(document["tensors"])
        model, engine = document["model"], document["engine"]
        prompts = tuple(self._prompt(each) for each in document["prompts"].elements())
        recording = Recording(
            utc=document["recorded"]["utc"].text(),
            version=document["recorded"]["onnx_parity"].text(),
            model=RecordedModel(
                name=model["name"].text(),
                sha256=model["sha256"].text(),
                topology_sha256=model["topology_sha256"].text(),
                topology_outcome=model["topology_outcome"].text(),
                ignore_declared=model["ignore_declared"].flag(),
            ),
            engine=RecordedEngine(
                name=engine["name"].text(),
                options=engine["options"].settings(),
                process=engine["process"].one_of(("isolated", "in-process")),
                info=engine["session"].maybe(_session),
                seconds=engine["seconds"].seconds(),
                failure=engine["failure"].maybe(_error),
            ),
            max_new_tokens=document["max_new_tokens"].count(),
            stop_ids=document["stop_ids"].counts(),
            top_k=document["top_k"].count(),
            notes=document["notes"].texts(),
            prompts=prompts,
        )
        info = recording.engine.info
        if info is not None and info.engine != recording.engine.name:
            raise misfit(
                self._path,
                f"contradicts itself: the engine is {recording.engine.name!r:.40}, and its session says that "
                f"it is {info.engine!r:.40}",
            )
        if document["settings_sha256"].value != recording.settings_sha256:
            raise misfit(self._path, "was changed: its settings are not those of settings_sha256")
        return _with_info(recording)

    def _document(self) -> Value:
        metadata = self._opened.metadata() or {}
        kind, _, number = metadata.get("format", "").rpartition("/")
        if kind != FORMAT or not (number.isascii() and number.isdigit()):
            raise misfit(
                self._path,
                "has no format of ours in its metadata: it is another kind of safetensors file",
                "Name a file that onnx-parity record wrote.",
            )
        if int(number[:9]) != VERSION:
            age, action = (
                ("a newer", "Update onnx-parity, or record it with this version.")
                if int(number[:9]) > VERSION
                else ("another", "Record it anew.")
            )
            raise misfit(
                self._path,
                f"has format {number[:9]}, of {age} onnx-parity; this one reads format {VERSION}",
                action,
            )
        text = metadata.get("document", "")
        if hashlib.sha256(text.encode()).hexdigest() != metadata.get("document_sha256"):
            raise misfit(self._path, "was changed: its document is not the one that was written")
        try:
            value = json.loads(text, object_pairs_hook=unique_keys)
            json.dumps(value, allow_nan=False)  # Python's parser takes numbers that JSON has not
        except (ValueError, RecursionError) as error:
            raise misfit(self._path, f"has a document that is no JSON: {error}") from error
        return Value(self._path, "", value)

    def _check_tensors(self, listed: Value) -> None:
        """Every tensor is there, is as it was written, and is one of ours."""
        import numpy as np

        there = set(self._opened.keys())
        for name in sorted(there - listed.mapping().keys()):
            raise misfit(self._path, f"was changed: it has a tensor {name!r:.60} that nobody wrote")
        for name, facts in listed.items():
            if name not in there:
                raise misfit(self._path, f"lacks the tensor {name!r:.60}, which its document names")
            array = self._opened.get_tensor(name)
            if tensor_sha256(array) != facts["sha256"].value:
                raise misfit(self._path, f"was changed: the tensor {name!r:.60} is another one")
            dtype, shape = facts["dtype"].text(), facts["shape"].counts()
            try:
                kind = numpy_dtype(dtype)
                whole = array if is_native(kind) else array.view(kind).reshape(shape)
            except (TypeError, ValueError) as error:
                raise facts["dtype"].wrong("an element type of these bytes") from error
            if (whole.shape, whole.dtype) != (shape, np.dtype(kind)):
                raise misfit(self._path, f"was changed: the tensor {name!r:.60} has another shape or type")
            if not name.partition(".output.")[1]:
                self._arrays[name] = whole

    def _tensor(self, name: str, dtype: str) -> NDArray[Any]:
        array = self._arrays.get(name)
        if array is None:
            raise misfit(self._path, f"lacks the tensor {name!r:.60}, which a check needs")
        if array.dtype != dtype or array.ndim != 1:
            raise misfit(self._path, f"has the tensor {name!r:.60} in a form other than a list of {dtype}")
        return array

    def _prompt(self, value: Value) -> RecordedPrompt:
        inputs = {}
        for port, name in value["inputs"].items():
            if name.text() not in self._arrays:
                raise misfit(self._path, f"lacks the tensor {name.value!r:.60}, which {port!r} was fed")
            inputs[port] = self._arrays[name.value]
        prompt = Prompt(
            value["prompt_ids"].counts(),
            value["text"].maybe(Value.text),
            value["source_ids"].counts(),
            inputs,
        )
        index = value.where.rpartition("[")[2].rstrip("]")
        decodes = tuple(
            self._decode(f"prompt.{index}.decode.{number}", each, prompt)
            for number, each in enumerate(value["decodes"].elements())
        )
        return RecordedPrompt(prompt, decodes)

    def _decode(self, prefix: str, value: Value, prompt: Prompt) -> RecordedDecode:
        if value["opening"].value is not None:
            return RecordedDecode(None, _error(value["opening"]))
        tokens = self._tensor(f"{prefix}.token_ids", "int64").tolist()
        counts = self._tensor(f"{prefix}.top_counts", "int64").tolist()
        top_ids = self._tensor(f"{prefix}.top_ids", "int64").tolist()
        top_logits = self._tensor(f"{prefix}.top_logits", "float64").tolist()
        has_nan = self._tensor(f"{prefix}.has_nan", "uint8").tolist()
        if not (
            len(tokens) == len(counts) == len(has_nan)
            and len(top_ids) == len(top_logits) == sum(counts)
            and all(count > 0 for count in counts)
        ):
            raise misfit(self._path, f"contradicts itself: {prefix} has not the logits of each of its tokens")
        steps, first = [], 0
        for count, nan in zip(counts, has_nan, strict=True):
            part = slice(first, first + count)
            steps.append(TopLogits(tuple(top_ids[part]), tuple(top_logits[part]), bool(nan)))
            first += count
        for index, (token, step) in enumerate(zip(tokens, steps, strict=True)):
            fault = _fault_of_logits(step)
            if fault is None and has_nan[index] > 1:
                fault = f"{has_nan[index]} as has_nan, which is 0 or 1"
            if fault is None and token != step.argmax:
                fault = f"token {token}, where its largest logit is that of {step.argmax}"
            if fault is not None:
                raise misfit(self._path, f"contradicts itself: {prefix} has at step {index} {fault}")
        trace = Trace(
            prompt.token_ids,
            tuple(tokens),
            tuple(steps),
            value["seconds"].seconds(),
            _NOTHING_YET,
            value["failure"].maybe(_trace_failure),
        )
        outputs = {
            port: self._output(f"{prefix}.output.{port}", output) for port, output in value["outputs"].items()
        }
        return RecordedDecode(trace, outputs=outputs)

    def _output(self, name: str, value: Value) -> RecordedTensor:
        """What is said of an output; where the file has it whole, that is the same."""
        output = RecordedTensor(
            value["dtype"].text(),
            value["shape"].counts(),
            value["sha256"].text(),
            kept=value["tensor"].value is not None,
        )
        if output.kept:
            if value["tensor"].value != name or name not in self._listed:
                raise misfit(self._path, f"lacks the tensor {name!r:.60}, which its document says was kept")
            # Its bytes have been held against these facts.
            facts = self._listed[name]
            for kind, said in (
                ("dtype", output.dtype),
                ("shape", list(output.shape)),
                ("sha256", output.sha256),
            ):
                if facts[kind] != said:
                    raise misfit(
                        self._path,
                        f"contradicts itself: the tensor {name!r:.60} has not the {kind} that is said of it",
                    )
        return output


def _fault_of_logits(top: TopLogits) -> str | None:
    """What `harness.engines.base.TopLogits` cannot be; None where it can."""
    pairs = list(zip(top.token_ids, top.values, strict=True))
    if len(set(top.token_ids)) < len(pairs):
        return f"a token ID twice among {', '.join(map(str, top.token_ids))}"
    if min(top.token_ids) < 0:
        return f"token ID {min(top.token_ids)}"
    if not top.has_nan and any(map(math.isnan, top.values)):
        return "a logit that is NaN, and says that it has none"
    for (before, larger), (token, value) in pairwise(pairs):
        if not may_follow(value, token, larger, before):
            return (
                f"token {token} with {value:g} behind token {before} with {larger:g}: the largest logit "
                "comes first, and of equal ones the lowest ID"
            )
    return None


_NOTHING_YET = SessionInfo("", "")
"""What a trace that is being read says of its session, until the session has been read."""


def _with_info(recording: Recording) -> Recording:
    info = recording.engine.info
    if info is None:
        return recording
    prompts = tuple(
        replace(
            prompt,
            decodes=tuple(
                decode if decode.trace is None else replace(decode, trace=replace(decode.trace, session=info))
                for decode in prompt.decodes
            ),
        )
        for prompt in recording.prompts
    )
    return replace(recording, prompts=prompts)


def _session(value: Value) -> SessionInfo:
    return SessionInfo(
        value["engine"].text(),
        value["version"].text(),
        value["settings"].settings(),
        value["placement"].maybe(_placement),
        value["mode"].maybe(_mode),
    )


def _mode(value: Value) -> str:
    found: str = value.one_of(("eager", "captured"))
    return found


def _placement(value: Value) -> dict[str, Any]:
    """Numbers of nodes by provider and operator, and whatever else an engine says."""
    if "providers" in value.mapping():
        for _, operators in value["providers"].items():
            for _, nodes in operators.items():
                nodes.count()
    return value.mapping()


def _details(value: Value) -> FailureDetails:
    return FailureDetails(
        value["signal"].maybe(Value.text),
        value["exit_code"].maybe(_exit_code),
        value["limit"].maybe(Value.text),
        value["stderr_tail"].maybe(Value.text),
    )


def _exit_code(value: Value) -> int:
    if type(value.value) is not int:
        raise value.wrong("a whole number")
    return value.value


def _error(value: Value) -> EngineFailedError:
    return EngineFailedError(
        value["message"].text(),
        next_action=value["next"].text(),
        kind=value["kind"].one_of(_KINDS),
        step=value["step"].maybe(Value.count),
        details=_details(value["details"]),
    )


def _trace_failure(value: Value) -> TraceFailure:
    return TraceFailure(
        value["kind"].one_of(_KINDS),
        value["step"].count(),
        value["message"].text(),
        _details(value["details"]),
        tuple(port.text() for port in value["ports"].elements()),
    )
