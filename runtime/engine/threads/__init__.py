"""The engine's thread, and how what it draws reaches event loops."""
