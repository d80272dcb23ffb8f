"""What changes to a step cost a model: held-out text through decode programs."""
