"""What is behind the pages of the KV cache: rates of a store, and faults."""
