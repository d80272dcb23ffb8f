"""Decides before a step runs where its nodes are and which way a prompt's experts take, and counts
what it reads from memory."""
