"""Rows of the op table: what one is made of, and those of some kinds of ops."""
