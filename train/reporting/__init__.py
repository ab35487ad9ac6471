"""Tables, figures and progress."""
