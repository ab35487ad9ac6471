"""Compiles and measures a trained teacher."""
