"""Benchmarks: speed and memory live here, never in timed tests."""
