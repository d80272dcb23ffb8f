"""What lies in a GPU's memory, how much fits, and in which layouts; what crosses to it from pinned
memory."""
