"""What can be learned: classification and captioning."""
