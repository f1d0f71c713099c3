"""Channel attention: one gate per channel."""
