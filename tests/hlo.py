"""What a lowered module holds: the shapes of its arrays."""

import math
import re

import jax


def largest_array(function, arguments, platforms):
    """The shape of the largest array in the module, lowered for these platforms from here."""
    traced = jax.jit(function).trace(*arguments)
    text = traced.lower(lowering_platforms=tuple(platforms)).as_text()
    shapes = [
        tuple(int(n) for n in found.split("x")[:-1])
        for found in set(re.findall(r"tensor<((?:\d+x)+)[a-z]", text))
    ]
    return max(shapes, key=math.prod)
