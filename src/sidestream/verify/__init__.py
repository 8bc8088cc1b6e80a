"""A judge for the prefix cache of any OpenAI-compatible server: it compares answers that differ only in what the server
could reuse. It knows nothing of the server's inside, and imports nothing of the engine.

    endpoint   HTTP: requests, answers, resets
    judge      how far two answers to one request are apart, and what that means
    rounds     the situations in which the same requests are asked again
    report     the outcome as text and JSON
"""

from sidestream.verify.endpoint import Answer, Ask, Endpoint
from sidestream.verify.judge import Comparison, Verdict, compare
from sidestream.verify.rounds import Plan, Round, Wrong, verify

__all__ = ["Answer", "Ask", "Comparison", "Endpoint", "Plan", "Round", "Verdict", "Wrong", "compare", "verify"]
