"""Closures by fused attention kernels: the kernels, their gradient, the loop."""
