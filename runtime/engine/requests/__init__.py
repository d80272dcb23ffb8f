"""Requests: how they come in and are checked, what is known of each, and what their clients get."""
