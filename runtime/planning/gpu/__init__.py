"""Plans for machines with GPUs: what fits where, what crosses, and by which way prompts go."""
