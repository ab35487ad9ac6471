"""The attention operators that the paper compares with."""
