"""What may come next, guessed cheaply on the device, and how much of it was right. Knows nothing of requests, blocks or
the host.
"""

from sidestream.speculate.accept import accept_lengths
from sidestream.speculate.likeliest import likeliest
from sidestream.speculate.ngram import NgramProposer
from sidestream.speculate.proposer import Context, Proposer, Shown

__all__ = ["Context", "NgramProposer", "Proposer", "Shown", "accept_lengths", "likeliest"]
