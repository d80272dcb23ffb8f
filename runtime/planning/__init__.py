"""What is decided before a step runs: where its nodes are, which way the experts of a prompt take;
and what it reads from memory."""
