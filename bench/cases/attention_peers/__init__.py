"""Other libraries on the attention cases, in the process that times ours."""
