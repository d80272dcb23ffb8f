"""What a process does as it starts: its streams, the path of its model, and transformers without
what it needs not."""
