"""Speculative decoding: proposers that draft tokens on the device. Knows nothing about requests or blocks."""

from sidestream.speculate.proposer import Context, NgramProposer, Proposer, StepTokens

__all__ = ["Context", "NgramProposer", "Proposer", "StepTokens"]
