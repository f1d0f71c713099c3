"""Attention modules in existing models: choosing sites, inserting modules, loading checkpoints."""
