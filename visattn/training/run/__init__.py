"""What a run keeps on disk and shares between processes."""
