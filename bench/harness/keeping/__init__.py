"""Rows that are kept as they are measured, and what results say of how they were made."""
