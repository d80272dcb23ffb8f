"""Steps of a runner on GPUs: programs bound to launches and graphs, and run beside others."""
