"""Which experts tokens take, and which of them are kept on a GPU."""
