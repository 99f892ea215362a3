"""Trace files: a recording as one safetensors file, with a JSON document among its metadata.

The document names every tensor with its hash, and the metadata have the hash of the document.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.engines.tensor_types import dtype_of_array, is_native
from harness.errors import EngineFailedError, InputError
from harness.parity.recorded import (
    RecordedDecode,
    RecordedPrompt,
    RecordedTensor,
    Recording,
    stored_bytes,
    tensor_sha256,
)
from harness.report.replacing import replacing

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["FORMAT", "VERSION", "write_trace"]

FORMAT = "onnx-parity/trace"
VERSION = 1


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
                "ports": list(failure.ports),
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
