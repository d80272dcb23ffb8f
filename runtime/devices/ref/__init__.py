"""The reference device: a program's reference ops, in float32, on a thread that plays a stream."""
