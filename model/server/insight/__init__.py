"""What no other API tells: which experts tokens used, and what workers and GPUs did."""
