"""Data sets: reads them, resizes images, makes tokens."""
