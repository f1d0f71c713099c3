"""Proofs with kept results: each is run again only if a file changed that it read."""
