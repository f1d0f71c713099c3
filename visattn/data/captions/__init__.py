"""Pictures with captions."""
