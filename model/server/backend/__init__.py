"""The model as the server's HTTP side sees it: on an engine of this process, or of another."""
