"""What a step has around its products."""
