"""k-means per head, for codebooks of the tokens of calibration batches."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.jit, static_argnames=("num_centres", "num_steps"))
def kmeans(
    rng: jax.Array, tokens: jax.Array, valid: jax.Array, *, num_centres: int, num_steps: int = 25
) -> jax.Array:
    """Lloyd's algorithm from k-means++ centres, for every head.

    Args:
      rng: a JAX random key.
      tokens: ``(H, T, d)``.
      valid: bool ``(H, T)``. A head without valid tokens gets zeros.
      num_centres: R; with fewer distinct tokens, centres repeat.
      num_steps: number of Lloyd steps. A centre that loses all its tokens stays in place.

    Returns:
      ``(H, R, d)``.
    """
    common = jnp.sum(jnp.where(valid[..., None], tokens, jnp.zeros_like(tokens)), -2)
    count = jnp.maximum(valid.sum(-1, dtype=tokens.dtype), jnp.ones((), tokens.dtype))
    common = common / count[..., None]
    tokens = jnp.where(valid[..., None], tokens - common[..., None, :], jnp.zeros_like(tokens))
    one_head = lambda key, x, keep: _one_head(key, x, keep, num_centres, num_steps)
    centres = jax.vmap(one_head)(jax.random.split(rng, tokens.shape[0]), tokens, valid)
    return centres + common[..., None, :]


def _one_head(key, x, keep, num_centres, num_steps):
    weight = keep.astype(x.dtype)

    def draw(i, carry):
        centres, nearest = carry
        chance = jnp.where(nearest.max() > 0, nearest, weight)
        logits = jnp.where(chance > 0, jnp.log(jnp.maximum(chance, 1e-30)), -jnp.inf)
        logits = jnp.where(keep.any(), logits, jnp.zeros_like(logits))
        new = x[jax.random.categorical(jax.random.fold_in(key, i), logits)]
        square = jnp.sum(jnp.square(x - new[None]), -1) * weight
        return centres.at[i].set(new), jnp.minimum(nearest, square)

    far = jnp.full_like(weight, jnp.finfo(x.dtype).max) * weight
    start = (jnp.zeros_like(x, shape=(num_centres, x.shape[-1])), jnp.where(keep, far, 0.0))
    # The first draw is uniform: every nearest distance is the same.
    centres, _ = jax.lax.fori_loop(0, num_centres, draw, start)

    def lloyd(_, centres):
        square = jnp.sum(jnp.square(centres), -1)[None] - 2 * x @ centres.T
        member = jax.nn.one_hot(square.argmin(-1), num_centres, dtype=x.dtype) * weight[:, None]
        mass = member.sum(0)[:, None]
        return jnp.where(mass > 0, member.T @ x / jnp.maximum(mass, 1), centres)

    return jax.lax.fori_loop(0, num_steps, lloyd, centres)
