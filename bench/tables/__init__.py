"""Rows of whole models as text, tables and plots."""
