"""`pykernels bench prefill`: prompts with experts in main memory, by each way there is."""
