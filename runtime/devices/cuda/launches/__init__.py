"""The ops of the ``cuda`` device: a function for each that binds a node to memory."""
