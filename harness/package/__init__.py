"""A model directory, its graphs and what it declares, as plain mappings.

A package is a folder with one or more graphs (`*.onnx` and external data) and, optionally,
`inference_metadata.yaml`, `genai_config.json` and tokenizer files. Nothing here interprets what is declared
about ports (`harness.topology` does), and neither numpy nor a runtime is imported.
"""

from harness.package.components import Component, Components
from harness.package.directory import Package, open_package
from harness.package.hashing import model_files, model_sha256
from harness.package.writing import write_sidecar

__all__ = [
    "Component",
    "Components",
    "Package",
    "model_files",
    "model_sha256",
    "open_package",
    "write_sidecar",
]
