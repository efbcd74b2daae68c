"""Signatures of tensors and values, C3 verdicts, and the readiness contract."""

from scout_core.consensus.c3 import C3Result, C3Status, classify_exact, classify_statistical
from scout_core.consensus.signature import combined_signature, signatures, tensor_signature
from scout_core.consensus.structure import structure_signature

__all__ = [
    "C3Result",
    "C3Status",
    "classify_exact",
    "classify_statistical",
    "combined_signature",
    "signatures",
    "structure_signature",
    "tensor_signature",
]
