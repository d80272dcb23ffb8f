"""Several servers as one: nodes that read prompts, nodes that write answers, and a router."""
