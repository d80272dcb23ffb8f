"""What a step is made of in time: spans of workers, streams and the engine's thread, recorded,
measured, and written as a trace for Perfetto and as a picture."""
