"""Speculative decoding: proposers that draft tokens on the device. Knows nothing about requests or blocks."""

from sidestream.speculate.ngram import NgramProposer
from sidestream.speculate.proposer import Context, Proposer, StepTokens

__all__ = ["Context", "NgramProposer", "Proposer", "StepTokens"]
