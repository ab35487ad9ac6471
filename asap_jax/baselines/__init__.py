"""The attention operators to which the paper compares."""
