"""Heads of models, judged by the gradient of their scores; `python -m tests.capturing.heads` prints a table."""
