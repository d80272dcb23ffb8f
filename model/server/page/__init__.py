"""The page at `/`: a chat, and what the model does meanwhile."""
