"""What is timed: the experts on the CPU, and every operation of the GPU with its peers."""
