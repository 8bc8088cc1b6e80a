"""Speculative decoding: proposers that draft tokens on the device. Knows nothing about requests or blocks."""

from sidestream.speculate.proposer import Context, GrammarProposer, NgramProposer, Proposer, StepTokens

__all__ = ["Context", "GrammarProposer", "NgramProposer", "Proposer", "StepTokens"]
