"""The machine: devices, timing, and errors that the user can fix."""
