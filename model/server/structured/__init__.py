"""Output that keeps to a grammar: JSON schemas, regular expressions, lark, forced tool calls."""

from .constraint import GrammarConstraint
from .request import constraint_for
from .vocabulary import Vocabulary

__all__ = ["GrammarConstraint", "Vocabulary", "constraint_for"]
