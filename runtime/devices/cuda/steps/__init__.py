"""Steps of a runner on GPUs: made ready to run, and run beside others."""
