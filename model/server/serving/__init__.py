"""One model that requests are served by: admission, prompts, generation, metrics."""
