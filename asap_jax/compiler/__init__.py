"""Compiling a trained model: calibration, fits, report."""
