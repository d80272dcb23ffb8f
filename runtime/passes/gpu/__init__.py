"""What programs need on their way to a GPU."""
