"""The GPU's kernels against its roofs and against torch: one table and a plot a machine."""
