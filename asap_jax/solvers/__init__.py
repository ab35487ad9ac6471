"""Half-steps on the scores: log domain, matrix scaling, tiles, and how a call is shared out."""
