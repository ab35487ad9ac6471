"""A trained teacher compiled and measured."""
