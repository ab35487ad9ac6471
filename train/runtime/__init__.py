"""The machine: devices, timing, errors for a person."""
