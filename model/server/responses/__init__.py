"""OpenAI's Responses API, without what a server would have to keep."""
