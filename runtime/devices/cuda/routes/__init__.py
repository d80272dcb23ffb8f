"""Steps of streamed prompts on other GPUs than the one that decodes."""
