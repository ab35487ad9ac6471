"""Training a teacher and keeping its run folder."""
