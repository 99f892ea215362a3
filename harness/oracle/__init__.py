"""Our own executor of ONNX graphs in numpy, independent of every runtime under test."""

from __future__ import annotations

from harness.oracle.deferred import DeferredOutput
from harness.oracle.model import RESIDENT_LIMIT, OracleModel, TensorSpec
from harness.oracle.proof import Proof, ProofEntry

__all__ = ["RESIDENT_LIMIT", "DeferredOutput", "OracleModel", "Proof", "ProofEntry", "TensorSpec"]
