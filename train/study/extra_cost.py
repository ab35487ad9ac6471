"""Counts the cost of predicting a dual, in addition to attention itself.

The unit is a score product: the ``N M d`` multiply-adds of one head's scores.  The count has the
multiply-adds of all matrix products as they are traced.  It leaves out element-wise work,
exponentials and sorts, so slices, which sort, cost more than their count says.  It also leaves out
the closures, each of which passes over the ``N x M`` scores once.
"""

import asap_jax as aj

OTHER = {"query": "key", "key": "query"}


def score_products(
    predictor: aj.Predictor, num_queries: int, num_keys: int, head_dim: int
) -> float:
    """Multiply-adds of a prediction for one head, in score products.

    Args:
      predictor: its features are slices, moments or codebooks, and its head is linear or has a
        hidden layer. Its corrections between closures and its row masses are counted too.
      num_queries, num_keys, head_dim: N, M and d of the layer.

    Raises:
      TypeError: the predictor has another family of features.
    """
    lengths = {"query": num_queries, "key": num_keys}
    side = predictor.side
    total = _prediction(predictor, lengths[side], lengths[OTHER[side]], head_dim)
    for correction in predictor.corrections:
        side = OTHER[side]  # the side of the dual after the closure
        own, other = lengths[side], lengths[OTHER[side]]
        total += own  # the dual times its coefficient
        total += sum(_family(f, own, other, head_dim, True) for f in correction.features)
    if predictor.row_mass is not None:
        own, other = num_queries, num_keys
        families = predictor.row_mass.features
        total += sum(_family(f, own, other, head_dim, True) for f in families)
    return total / (num_queries * num_keys * head_dim)


def _prediction(predictor, own: int, other: int, d: int) -> int:
    """Multiply-adds for one head, with ``own`` tokens on the predictor's side."""
    head = predictor.head
    linear = isinstance(head, aj.LinearHead)
    total = sum(_family(family, own, other, d, linear) for family in predictor.features)
    if linear:
        return total
    width, hidden = head.hidden.shape[-2:]
    return total + own * (width + width * hidden + hidden)


def _family(family, own: int, other: int, d: int, linear: bool) -> int:
    """Multiply-adds of a family's features, and with a linear head of combining them."""
    if isinstance(family, aj.SlicedPotentials):
        slices = family.directions.shape[-2]
        return (own + other) * slices * d + (own * slices if linear else 0)
    if isinstance(family, aj.Moments):
        return _moments(family, own, other, d, linear)
    if isinstance(family, aj.Codebook):
        return _codebook(family, own, other, d)
    raise TypeError(f"the cost of {type(family).__name__} features is not known")


def _moments(family, own, other, d, linear) -> int:
    """Both covariances, then one folded form ``u.a + u'Bu`` or every feature on its own."""
    covariances = (own + other) * d**2
    if linear:
        return covariances + d**3 + d**2 + own * d**2
    return covariances + 2 * own * d**2 + (5 if family.absolute else 3) * own * d


def _codebook(family, own, other, d) -> int:
    """Tangents at the centres of the own side, mixtures at the others, the inner prediction."""
    centres, other_centres = family.own.shape[-2], family.other.shape[-2]
    tangents = centres * (2 * own + 2 * other)
    mixtures = other_centres * (2 * own + 3 * other)
    return (tangents + mixtures) * d + _prediction(family.inner, other, own, d)
