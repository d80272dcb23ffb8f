"""What several commands share: consoles and errors, options, a model that is loaded."""
