"""Speculative decoding: proposers that draft tokens on the device, and verification of drafts.

Knows nothing of requests, blocks or the host.
"""

from sidestream.speculate.accept import accept_lengths
from sidestream.speculate.argmax import argmax
from sidestream.speculate.ngram import NgramProposer
from sidestream.speculate.proposer import Context, Proposer, StepTokens

__all__ = ["Context", "NgramProposer", "Proposer", "StepTokens", "accept_lengths", "argmax"]
