"""GGUF files of random models for llama.cpp's programs: tensors and metadata, a file a family."""
