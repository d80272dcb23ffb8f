"""Replacements of modules: the operators, their register, and the injection by rules."""
