"""What a model will do on a machine that need not be here: placement, memory, speed, and what
would change them, from headers or a configuration alone."""
