"""Recipes: the settings of the training runs."""
