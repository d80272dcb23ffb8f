"""`pykernels bench prefill`: prompts beside experts in main memory, by each way there is."""
