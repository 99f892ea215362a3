"""The command `onnx-parity`: one module for each verb, all of them thin."""

from __future__ import annotations

from harness.cli.app import main

__all__ = ["main"]
