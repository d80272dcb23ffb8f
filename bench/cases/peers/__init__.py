"""What torch and FlashInfer have for the same cases."""
