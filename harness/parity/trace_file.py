"""Trace files: a recording as one safetensors file, with a JSON document among its metadata.

The document names every tensor with its hash, and the metadata have the hash of the document: what was
changed since is found and named. A hash is no signature: of someone who writes every hash anew, only what
contradicts itself is found (tokens that the logits did not choose), and what another model says of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.decode.trace import Trace, TraceFailure
from harness.engines.base import SessionInfo, TopLogits
from harness.engines.tensor_types import dtype_of_array, is_native, numpy_dtype
from harness.errors import EngineFailedError, FailureDetails, InputError
from harness.parity.candidate import Prompt
from harness.parity.recorded import (
    RecordedDecode,
    RecordedEngine,
    RecordedModel,
    RecordedPrompt,
    RecordedTensor,
    Recording,
    stored_bytes,
    tensor_sha256,
)
from harness.report.replacing import replacing

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from safetensors import safe_open

__all__ = ["FORMAT", "VERSION", "read_trace", "write_trace"]

FORMAT = "onnx-parity/trace"
VERSION = 1

_KINDS = ("crashed", "timeout", "unsupported")


def write_trace(path: Path, recording: Recording) -> None:
    """Write a recording to `path`, in one step.

    Raises:
        InputError: the place cannot be written to.
    """
    from safetensors.numpy import save_file

    document, tensors = _Writer().document(recording)
    text = json.dumps(document, ensure_ascii=True, allow_nan=False)
    metadata = {
        "format": f"{FORMAT}/{VERSION}",
        "document": text,
        "document_sha256": hashlib.sha256(text.encode("ascii")).hexdigest(),
    }
    try:
        with replacing(path) as draft:
            save_file(tensors, draft, metadata)
    except OSError as error:
        raise InputError(
            f"{path}: the trace cannot be written: {error.strerror or error}.",
            next_action="Choose another place with -o.",
        ) from error


def read_trace(path: Path) -> Recording:
    """Read what `write_trace` wrote; caches and states that were kept whole stay in the file.

    Raises:
        InputError: it is no trace, or one of another version; it was changed after it was written, or
            contradicts itself. The message names the part.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        what = "is no regular file" if path.exists() else "does not exist"
        raise InputError(
            f"{path}: the trace {what}.", next_action="Name a file that onnx-parity record wrote."
        )
    try:
        with safe_open(path, framework="np") as opened:
            return _Reader(path, opened).recording()
    except SafetensorError as error:
        raise _misfit(path, f"is damaged, or no trace: {' '.join(str(error).split())}") from error
    except OSError as error:
        raise _misfit(path, f"cannot be read: {error.strerror or error}") from error


def _misfit(path: Path, what: str, action: str | None = None) -> InputError:
    return InputError(
        f"{path}: the trace {what}.",
        next_action=action or "Copy it again from where it was recorded, or record it anew.",
    )


class _Writer:
    """Gathers the tensors of a recording while its document is made."""

    def __init__(self) -> None:
        self._tensors: dict[str, NDArray[Any]] = {}
        self._listed: dict[str, Any] = {}

    def document(self, recording: Recording) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """The document, and the tensors that it names."""
        engine, info = recording.engine, recording.engine.info
        prompts = [self._prompt(index, each) for index, each in enumerate(recording.prompts)]
        document = {
            "schema": f"{FORMAT}/{VERSION}",
            "recorded": {"utc": recording.utc, "onnx_parity": recording.version},
            "model": asdict(recording.model),
            "engine": {
                "name": engine.name,
                "options": dict(engine.options),
                "process": engine.process,
                "session": None
                if info is None
                else {
                    "engine": info.engine,
                    "version": info.version,
                    "settings": dict(info.settings),
                    "placement": info.placement,
                    "mode": info.mode,
                },
                "seconds": engine.seconds,
                "failure": _plain_error(engine.failure),
            },
            "max_new_tokens": recording.max_new_tokens,
            "stop_ids": list(recording.stop_ids),
            "top_k": recording.top_k,
            "settings_sha256": recording.settings_sha256,
            "notes": dict(recording.notes),
            "prompts": prompts,
            "tensors": self._listed,
        }
        return document, self._tensors

    def _prompt(self, index: int, recorded: RecordedPrompt) -> dict[str, Any]:
        import numpy as np

        prompt = recorded.prompt
        inputs = {}
        for port, value in prompt.extra.items():
            array = np.asarray(value)
            # The same arrays are given with every prompt: they stand in the file once.
            inputs[port] = self._add(f"input.{tensor_sha256(array)[:16]}", array)
        return {
            "text": prompt.text,
            "prompt_ids": list(prompt.token_ids),
            "source_ids": list(prompt.source_ids),
            "inputs": inputs,
            "decodes": [
                self._decode(f"prompt.{index}.decode.{number}", each)
                for number, each in enumerate(recorded.decodes)
            ],
        }

    def _decode(self, prefix: str, recorded: RecordedDecode) -> dict[str, Any]:
        import numpy as np

        trace = recorded.trace
        if trace is None:
            return {"opening": _plain_error(recorded.failure)}
        steps, failure = trace.steps, trace.failure
        counts = [len(step.token_ids) for step in steps]
        self._add(f"{prefix}.token_ids", np.array(trace.token_ids, dtype=np.int64))
        self._add(f"{prefix}.top_counts", np.array(counts, dtype=np.int64))
        top_ids = [token for step in steps for token in step.token_ids]
        self._add(f"{prefix}.top_ids", np.array(top_ids, dtype=np.int64))
        top_logits = [logit for step in steps for logit in step.values]
        self._add(f"{prefix}.top_logits", np.array(top_logits, dtype=np.float64))
        self._add(f"{prefix}.has_nan", np.array([step.has_nan for step in steps], dtype=np.uint8))
        return {
            "opening": None,
            "seconds": trace.seconds,
            "failure": None
            if failure is None
            else {
                "kind": failure.kind,
                "step": failure.step,
                "message": failure.message,
                "details": asdict(failure.details),
            },
            "outputs": {
                port: self._output(f"{prefix}.output.{port}", output)
                for port, output in recorded.outputs.items()
            },
        }

    def _output(self, name: str, output: RecordedTensor) -> dict[str, Any]:
        if output.array is not None:
            self._add(name, output.array)
        return {
            "dtype": output.dtype,
            "shape": list(output.shape),
            "sha256": output.sha256,
            "tensor": None if output.array is None else name,
        }

    def _add(self, name: str, array: NDArray[Any]) -> str:
        if name not in self._tensors:
            dtype, shape = dtype_of_array(array.dtype), list(array.shape)
            self._listed[name] = {"dtype": dtype, "shape": shape, "sha256": tensor_sha256(array)}
            # What numpy has no type for stands there as bytes; the document says what they are.
            stored = array if is_native(array.dtype) else stored_bytes(array)
            self._tensors[name] = _contiguous(stored)
        return name


def _contiguous(array: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    # Unlike numpy's own function, this one leaves an array without axes as it is.
    return np.require(array, requirements="C").reshape(array.shape)


def _plain_error(error: EngineFailedError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {
        "kind": error.kind,
        "step": error.step,
        "message": error.message,
        "next": error.next_action,
        "details": asdict(error.details),
    }


@dataclass(frozen=True, slots=True)
class _Value:
    """A value of the document, and where it stands: what reads it says what it must be."""

    path: Path
    where: str
    value: Any

    def wrong(self, must: str) -> InputError:
        return _misfit(self.path, f"holds {self.value!r:.40} as {self.where or 'its document'}, not {must}")

    def __getitem__(self, key: str) -> _Value:
        if not isinstance(self.value, dict) or key not in self.value:
            where = f"{self.where}.{key}" if self.where else key
            raise _misfit(self.path, f"lacks {where}, which a check needs")
        return _Value(self.path, f"{self.where}.{key}" if self.where else key, self.value[key])

    def items(self) -> Iterator[tuple[str, _Value]]:
        if not isinstance(self.value, dict):
            raise self.wrong("a mapping")
        return ((key, self[key]) for key in self.value)

    def elements(self) -> Iterator[_Value]:
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        return (_Value(self.path, f"{self.where}[{i}]", each) for i, each in enumerate(self.value))

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.wrong("a text")
        return self.value

    def one_of(self, choices: Sequence[str]) -> Any:
        if self.value not in choices:
            raise self.wrong(f"one of {', '.join(choices)}")
        return self.value

    def count(self) -> int:
        if type(self.value) is not int or self.value < 0:
            raise self.wrong("a whole number from 0")
        return self.value

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def seconds(self) -> float:
        if type(self.value) not in (int, float) or not self.value >= 0:
            raise self.wrong("a number from 0")
        return float(self.value)

    def counts(self) -> tuple[int, ...]:
        return tuple(each.count() for each in self.elements())

    def mapping(self) -> dict[str, Any]:
        return {key: each.value for key, each in self.items()}

    def texts(self) -> dict[str, str]:
        return {key: each.text() for key, each in self.items()}

    def settings(self) -> dict[str, bool | int | str]:
        found = {}
        for key, each in self.items():
            if not isinstance(each.value, bool | int | str):
                raise each.wrong("a text, a whole number, true or false")
            found[key] = each.value
        return found

    def maybe(self, read: Callable[[_Value], Any]) -> Any:
        return None if self.value is None else read(self)


class _Reader:
    """Reads one open file; `path` is for messages."""

    def __init__(self, path: Path, opened: safe_open) -> None:
        self._path = path
        self._opened = opened
        self._arrays: dict[str, NDArray[Any]] = {}

    def recording(self) -> Recording:
        """All of it, checked."""
        document = self._document()
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
        if document["settings_sha256"].value != recording.settings_sha256:
            raise _misfit(self._path, "was changed: its settings are not those of settings_sha256")
        return _with_info(recording)

    def _document(self) -> _Value:
        metadata = self._opened.metadata() or {}
        kind, _, number = metadata.get("format", "").rpartition("/")
        if kind != FORMAT or not (number.isascii() and number.isdigit()):
            raise _misfit(
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
            raise _misfit(
                self._path,
                f"has format {number[:9]}, of {age} onnx-parity; this one reads format {VERSION}",
                action,
            )
        text = metadata.get("document", "")
        if hashlib.sha256(text.encode()).hexdigest() != metadata.get("document_sha256"):
            raise _misfit(self._path, "was changed: its document is not the one that was written")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _misfit(self._path, f"has a document that is no JSON: {error}") from error
        return _Value(self._path, "", value)

    def _check_tensors(self, listed: _Value) -> None:
        """Every tensor is there, is as it was written, and is one of ours."""
        import numpy as np

        there = set(self._opened.keys())
        for name in sorted(there - listed.mapping().keys()):
            raise _misfit(self._path, f"was changed: it has a tensor {name!r:.60} that nobody wrote")
        for name, facts in listed.items():
            if name not in there:
                raise _misfit(self._path, f"lacks the tensor {name!r:.60}, which its document names")
            array = self._opened.get_tensor(name)
            if tensor_sha256(array) != facts["sha256"].value:
                raise _misfit(self._path, f"was changed: the tensor {name!r:.60} is another one")
            dtype, shape = facts["dtype"].text(), facts["shape"].counts()
            try:
                kind = numpy_dtype(dtype)
                whole = array if is_native(kind) else array.view(kind).reshape(shape)
            except (TypeError, ValueError) as error:
                raise facts["dtype"].wrong("an element type of these bytes") from error
            if (whole.shape, whole.dtype) != (shape, np.dtype(kind)):
                raise _misfit(self._path, f"was changed: the tensor {name!r:.60} has another shape or type")
            if not name.partition(".output.")[1]:
                self._arrays[name] = whole

    def _tensor(self, name: str, dtype: str) -> NDArray[Any]:
        array = self._arrays.get(name)
        if array is None:
            raise _misfit(self._path, f"lacks the tensor {name!r:.60}, which a check needs")
        if array.dtype != dtype or array.ndim != 1:
            raise _misfit(self._path, f"has the tensor {name!r:.60} in a form other than a list of {dtype}")
        return array

    def _prompt(self, value: _Value) -> RecordedPrompt:
        inputs = {}
        for port, name in value["inputs"].items():
            if name.text() not in self._arrays:
                raise _misfit(self._path, f"lacks the tensor {name.value!r:.60}, which {port!r} was fed")
            inputs[port] = self._arrays[name.value]
        prompt = Prompt(
            value["prompt_ids"].counts(),
            value["text"].maybe(_Value.text),
            value["source_ids"].counts(),
            inputs,
        )
        index = value.where.rpartition("[")[2].rstrip("]")
        decodes = tuple(
            self._decode(f"prompt.{index}.decode.{number}", each, prompt)
            for number, each in enumerate(value["decodes"].elements())
        )
        return RecordedPrompt(prompt, decodes)

    def _decode(self, prefix: str, value: _Value, prompt: Prompt) -> RecordedDecode:
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
            raise _misfit(
                self._path, f"contradicts itself: {prefix} has not the logits of each of its tokens"
            )
        steps, first = [], 0
        for count, nan in zip(counts, has_nan, strict=True):
            part = slice(first, first + count)
            steps.append(TopLogits(tuple(top_ids[part]), tuple(top_logits[part]), bool(nan)))
            first += count
        for index, (token, step) in enumerate(zip(tokens, steps, strict=True)):
            if token != step.argmax:
                raise _misfit(
                    self._path,
                    f"contradicts itself: {prefix} has token {token} at step {index}, where its largest "
                    f"logit is that of {step.argmax}",
                )
        trace = Trace(
            prompt.token_ids,
            tuple(tokens),
            tuple(steps),
            value["seconds"].seconds(),
            _NOTHING_YET,
            value["failure"].maybe(_trace_failure),
        )
        outputs = {
            port: RecordedTensor(
                output["dtype"].text(),
                output["shape"].counts(),
                output["sha256"].text(),
                kept=output["tensor"].value is not None,
            )
            for port, output in value["outputs"].items()
        }
        return RecordedDecode(trace, outputs=outputs)


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


def _session(value: _Value) -> SessionInfo:
    return SessionInfo(
        value["engine"].text(),
        value["version"].text(),
        value["settings"].settings(),
        value["placement"].maybe(_Value.mapping),
        value["mode"].maybe(_Value.text),
    )


def _details(value: _Value) -> FailureDetails:
    return FailureDetails(
        value["signal"].maybe(_Value.text),
        value["exit_code"].maybe(_exit_code),
        value["limit"].maybe(_Value.text),
        value["stderr_tail"].maybe(_Value.text),
    )


def _exit_code(value: _Value) -> int:
    if type(value.value) is not int:
        raise value.wrong("a whole number")
    return value.value


def _error(value: _Value) -> EngineFailedError:
    return EngineFailedError(
        value["message"].text(),
        next_action=value["next"].text(),
        kind=value["kind"].one_of(_KINDS),
        step=value["step"].maybe(_Value.count),
        details=_details(value["details"]),
    )


def _trace_failure(value: _Value) -> TraceFailure:
    return TraceFailure(
        value["kind"].one_of(_KINDS),
        value["step"].count(),
        value["message"].text(),
        _details(value["details"]),
    )
