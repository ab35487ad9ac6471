"""Lowered modules as text, and the shapes of the arrays in them."""

import math
import re

import jax


def lowered(function, arguments, platforms):
    """The modules of a function, one for each platform, lowered on whatever machine this is."""
    traced = jax.jit(function).trace(*arguments)
    return [traced.lower(lowering_platforms=(name,)).as_text() for name in platforms]


def largest_array(text):
    """The shape of the module's largest array."""
    found = set(re.findall(r"tensor<((?:\d+x)+)[a-z]", text))
    return max((tuple(map(int, sizes.split("x")[:-1])) for sizes in found), key=math.prod)
