"""`pykernels bench serve`: a server that speaks OpenAI's API, driven and timed from outside."""
