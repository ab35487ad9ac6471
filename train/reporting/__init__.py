"""Tables and progress."""
