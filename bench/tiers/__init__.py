"""Times the levels behind the pages of the KV cache, and damages what is in them."""
