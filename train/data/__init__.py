"""Data sets: reading, resizing, tokens."""
