"""Structured output: compiles the form that an answer must have, and follows each answer through its grammar.

Knows token ids, never requests, steps or tensors. llguidance does the work, and is imported on first use.
"""

from sidestream.grammar.compiler import GrammarCompiler, check, expression_of
from sidestream.grammar.token_grammar import Grammars, TokenGrammar
from sidestream.grammar.token_rules import BudgetedAnswer, RuledAnswer

__all__ = ["BudgetedAnswer", "GrammarCompiler", "Grammars", "RuledAnswer", "TokenGrammar", "check", "expression_of"]
