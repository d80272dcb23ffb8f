"""OpenAI's and Anthropic's APIs over HTTP, on the engine."""
