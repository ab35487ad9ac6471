"""Trains a teacher and manages its run folder."""
