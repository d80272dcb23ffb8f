"""What a process does as it starts: its streams, and transformers without what it needs not."""
