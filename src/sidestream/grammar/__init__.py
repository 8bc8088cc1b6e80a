"""Structured output: compiles the form that an answer must have, and follows each answer through its grammar.

Knows token ids, never requests, steps or tensors. llguidance does the work, and is imported on first use.
"""

from sidestream.grammar.compiler import GrammarCompiler, check
from sidestream.grammar.token_grammar import TokenGrammar

__all__ = ["GrammarCompiler", "TokenGrammar", "check"]
