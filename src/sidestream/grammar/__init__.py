"""Structured output: compiles the form that an answer must have, and follows each answer through its grammar.

Knows token ids, never requests, steps or tensors. llguidance does the work, and is imported on first use.
"""

from sidestream.grammar.compiler import GrammarCompiler, check, expression_of
from sidestream.grammar.token_grammar import Grammars, TokenGrammar
from sidestream.grammar.token_rules import grammar_of

__all__ = ["GrammarCompiler", "Grammars", "TokenGrammar", "check", "expression_of", "grammar_of"]
