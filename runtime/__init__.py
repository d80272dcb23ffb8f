"""Machinery: threads, queues, streams, memory. Knows tensors and kernels, never transformers."""
