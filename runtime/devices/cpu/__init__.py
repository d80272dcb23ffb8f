"""The CPU as a device: programs on the workers' ring."""
