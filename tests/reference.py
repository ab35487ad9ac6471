"""Float64 NumPy references, written from the paper's formulas and importing nothing of ours.

Everything here is slow on purpose: one problem at a time, one token at a time where that is how
the formula reads. `batched` lifts a function of single problems over leading axes.

Conventions: N queries, M keys; `A` is on attention scale (rows sum to one, `A = N P`); duals are
epsilon times log scalings and 0 at inactive slots; a mask is True where attention is allowed.
"""

import itertools
import math

import numpy as np

# ------------------------------------------------------------------------------------ basics


def logsumexp(x, axis):
    """Log-sum-exp, -inf over a slice that is all -inf."""
    x = np.asarray(x, np.float64)
    peak = x.max(axis=axis, keepdims=True)
    peak = np.where(np.isfinite(peak), peak, 0.0)
    with np.errstate(divide="ignore"):
        return np.squeeze(np.log(np.exp(x - peak).sum(axis=axis, keepdims=True)) + peak, axis)


def batched(function, *arrays, **settings):
    """Applies `function` to each problem of a batch.

    `arrays` are `(array, rank)` pairs: the trailing `rank` axes belong to one problem, the axes
    before them broadcast. Numbers become float64; None arrays are passed as None.
    """
    arrays = [
        (a if a is None or np.asarray(a).dtype == bool else np.asarray(a, np.float64), r)
        for a, r in arrays
    ]
    lead = np.broadcast_shapes(*(np.shape(a)[: np.ndim(a) - r] for a, r in arrays if a is not None))
    full = [
        None if a is None else np.broadcast_to(a, (*lead, *np.shape(a)[np.ndim(a) - r :]))
        for a, r in arrays
    ]
    results = [
        function(*(None if a is None else a[index] for a in full), **settings)
        for index in np.ndindex(*lead)
    ]
    if isinstance(results[0], tuple):
        parts = zip(*results, strict=True)
        return tuple(np.stack(p).reshape(*lead, *np.shape(p[0])) for p in parts)
    return np.stack(results).reshape(*lead, *np.shape(results[0]))


def full_mask(mask, shape):
    """A bool mask of the given shape; everything allowed for None."""
    return np.ones(shape, bool) if mask is None else np.broadcast_to(np.asarray(mask) != 0, shape)


def center(x, valid=None):
    """Pi_0: subtracts the mean over the valid entries."""
    x = np.asarray(x, np.float64)
    valid = np.ones(x.shape, bool) if valid is None else valid
    return x - x[valid].mean() if valid.any() else x


# ----------------------------------------------------------------------------------- scores


def scores(q, k, *, scale=None, bias=None):
    """s_ij = scale q_i.k_j + bias_ij, any leading axes; masked bias entries become -inf."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    s = scale * (q @ np.swapaxes(k, -1, -2))
    if bias is not None:
        bias = np.asarray(bias, np.float64)
        s = s + np.where(bias <= -1e8, -np.inf, bias)
    return s


def query_shift(q, *, scale=None):
    """rho_i = scale |q_i|^2 / 2."""
    q = np.asarray(q, np.float64)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return scale * (q**2).sum(-1) / 2


def quadratic_cost(q, k, *, scale=None):
    """C_ij = scale |q_i - k_j|^2 / 2."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return scale * ((q[..., :, None, :] - k[..., None, :, :]) ** 2).sum(-1) / 2


# --------------------------------------------------------------------------------- Sinkhorn


def key_target(mask, key_mass):
    """Column sums on attention scale: the target at active keys, 0 elsewhere."""
    queries, keys = mask.any(1), mask.any(0)
    if key_mass == "unit":
        return keys.astype(np.float64)
    return keys * (queries.sum() / max(keys.sum(), 1))


def matrix_sinkhorn(s, *, num_steps, epsilon=1.0, mask=None, key_mass="balanced"):
    """The paper's iterations on the matrix itself (for scores that exp can hold)."""
    mask = full_mask(mask, s.shape) & (s > -np.inf)
    m = np.where(mask, np.exp(np.where(mask, s, 0.0) / epsilon), 0.0)
    target = key_target(mask, key_mass)
    for step in range(num_steps):
        total = m.sum(1 if step % 2 == 0 else 0, keepdims=True)
        m = m / np.where(total > 0, total, 1.0)
        if step % 2:
            m = m * target
    return m


def sinkhorn_history(s, *, num_steps, epsilon=1.0, mask=None, key_mass="balanced"):
    """The dual after each half-step, rows first, in the log domain: a list of (side, dual)."""
    mask = full_mask(mask, s.shape) & (s > -np.inf)
    target = key_target(mask, key_mass)
    history, g = [], np.zeros(s.shape[1])
    for step in range(1, num_steps + 1):
        if step % 2:
            f = query_ctransform(s, g, epsilon=epsilon, mask=mask)
            history.append(("query", f))
        else:
            with np.errstate(divide="ignore"):
                log_target = np.log(target)
            g = key_ctransform(s, f, epsilon=epsilon, log_target=log_target, mask=mask)
            history.append(("key", g))
    return history


def sinkhorn(s, *, num_steps, epsilon=1.0, mask=None, key_mass="balanced"):
    """The teacher's weights from its last two duals."""
    settings = {"epsilon": epsilon, "mask": mask}
    history = sinkhorn_history(s, num_steps=num_steps, key_mass=key_mass, **settings)
    duals = dict(history[-2:])
    return weights(s, duals["query"], duals.get("key", np.zeros(s.shape[1])), **settings)


def source_dual(s, *, num_steps, **settings):
    """The row dual from the last row step before the final closure; None for one step."""
    steps = num_steps - 1 if num_steps % 2 == 0 else num_steps - 2
    if steps < 1:
        return None
    return sinkhorn_history(s, num_steps=steps, **settings)[-1][1]


def aligned_dual(s, *, num_steps, before_end, **settings):
    """(side, dual) after step `num_steps - before_end`."""
    return sinkhorn_history(s, num_steps=num_steps - before_end, **settings)[-1]


# ------------------------------------------------------------------- closures and the plan


def key_ctransform(s, f, *, epsilon=1.0, log_target=0.0, mask=None):
    """g_j = eps log target_j - eps log sum_i exp((s_ij + f_i) / eps); 0 at keys without query."""
    mask = full_mask(mask, s.shape) & (s > -np.inf)
    g = np.zeros(s.shape[1])
    log_target = np.broadcast_to(log_target, g.shape)
    for j in np.flatnonzero(mask.any(0)):
        rows = mask[:, j]
        g[j] = epsilon * (log_target[j] - logsumexp((s[rows, j] + f[rows]) / epsilon, 0))
    return g


def query_ctransform(s, g, *, epsilon=1.0, log_target=0.0, mask=None):
    """f_i = eps log target_i - eps log sum_j exp((s_ij + g_j) / eps); 0 at queries without key."""
    mask = None if mask is None else full_mask(mask, s.shape).T
    return key_ctransform(s.T, g, epsilon=epsilon, log_target=log_target, mask=mask)


def weights(s, f, g, *, epsilon=1.0, mask=None):
    """A_ij = exp((s_ij + f_i + g_j) / eps), 0 where masked."""
    mask = full_mask(mask, s.shape) & (s > -np.inf)
    exponent = np.where(mask, (np.where(mask, s, 0.0) + f[:, None] + g[None, :]) / epsilon, -np.inf)
    return np.exp(exponent)


def close(s, dual, *, side, num_closures, epsilon=1.0, mask=None, key_mass="balanced"):
    """Weights after `num_closures` alternating closures that start from a dual on `side`."""
    mask = full_mask(mask, s.shape) & (s > -np.inf)
    settings = {"epsilon": epsilon, "mask": mask}
    with np.errstate(divide="ignore"):
        log_target = np.log(key_target(mask, key_mass))
    duals = {"query": np.zeros(s.shape[0]), "key": np.zeros(s.shape[1]), side: dual}
    for _ in range(num_closures):
        if side == "query":
            duals["key"] = key_ctransform(s, duals["query"], log_target=log_target, **settings)
            side = "key"
        else:
            duals["query"] = query_ctransform(s, duals["key"], **settings)
            side = "query"
    return weights(s, duals["query"], duals["key"], **settings)


def ending(closures, last_step):
    """Number of closures from the source dual of the paper's two operators."""
    if closures == "one_sided":
        return 1
    return 3 if last_step == "column" else 2


# ------------------------------------------------------------------------ sliced potentials


def square_potential(a, b):
    """The paper's formula for one slice, N = M: values in the original order, centred."""
    a, b = np.asarray(a, np.float64), np.sort(np.asarray(b, np.float64))
    order = np.argsort(a, kind="stable")
    potential = np.empty(len(a))
    phi = 0.0
    for r, i in enumerate(order):
        if r > 0:
            phi += b[r - 1] * (a[order[r]] - a[order[r - 1]])
        potential[i] = a[i] ** 2 / 2 - phi
    return potential - potential.mean()


def general_potential(a, b, query_valid=None, key_valid=None, *, outside="extend"):
    """One slice for any N and M: a piecewise-linear phi whose slopes are key quantiles.

    phi is 0 at the first valid query; its slope is the first key left of it, the last key right
    of the last valid query, and key number ceil(t M / N) after the t-th valid query. Queries
    that are not valid are evaluated on the same function, or given 0.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    query_valid = np.ones(len(a), bool) if query_valid is None else np.asarray(query_valid)
    key_valid = np.ones(len(b), bool) if key_valid is None else np.asarray(key_valid)
    if not query_valid.any() or not key_valid.any():
        return np.zeros(len(a))
    knots, keys = np.sort(a[query_valid]), np.sort(b[key_valid])
    n, m = len(knots), len(keys)

    def phi(x):
        if x <= knots[0]:
            return keys[0] * (x - knots[0])
        value = 0.0
        for t in range(1, n):
            slope = keys[-(-t * m // n) - 1]
            if x <= knots[t]:
                return value + slope * (x - knots[t - 1])
            value += slope * (knots[t] - knots[t - 1])
        return value + keys[-1] * (x - knots[-1])

    potential = np.array([x**2 / 2 - phi(x) for x in np.where(np.isfinite(a), a, 0.0)])
    potential -= potential[query_valid].mean()
    return potential if outside == "extend" else np.where(query_valid, potential, 0.0)


def sliced_features(
    q, k, directions, *, scale=None, query_valid=None, key_valid=None, outside="extend"
):
    """The feature matrix (N, L) of one head, from unit directions (L, d)."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    directions = np.asarray(directions, np.float64)
    directions = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    columns = []
    for theta in directions:
        a, b = math.sqrt(scale) * (q @ theta), math.sqrt(scale) * (k @ theta)
        columns.append(general_potential(a, b, query_valid, key_valid, outside=outside))
    return np.stack(columns, -1)


# ---------------------------------------------------------------------------------- moments


def moment_features(q, k, *, scale=None, query_valid=None, key_valid=None):
    """The features (N, d + 8) of one head, one query at a time, centred over the valid queries."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    query_valid = np.ones(len(q), bool) if query_valid is None else np.asarray(query_valid)
    key_valid = np.ones(len(k), bool) if key_valid is None else np.asarray(key_valid)
    own, other = q[query_valid], k[key_valid]
    m_own, m = own.mean(0), other.mean(0)
    c_own, c = (scale * np.cov(x.T, bias=True).reshape(2 * m.shape) for x in (own, other))
    rows = []
    for x in q:
        u, delta = x - m_own, m_own - m
        rows.append(
            [
                *(math.sqrt(scale) * u),
                scale * (x - m) @ (x - m) / 2,
                scale * u @ delta,
                scale * u @ c @ u,
                scale * (c @ u) @ (c @ u),
                scale * u @ c_own @ u,
                scale * u @ c @ delta,
                scale * u @ m,
                scale * u @ c @ m,
            ]
        )
    rows = np.array(rows)
    return rows - rows[query_valid].mean(0)


# --------------------------------------------------------------------------------- codebooks


def codebook_features(
    q, k, h, own, other, *, scale=None, epsilon=1.0, query_valid=None, key_valid=None
):
    """The 11 features (N, 11) of one head from the other side's score dual h (M,), centred.

    In score coordinates: they differ from those of shifted tokens by `scale q.mean(k)`, which is
    added here so that both are the same functions.
    """
    q, k, own, other = (np.asarray(x, np.float64) for x in (q, k, own, other))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    query_valid = np.ones(len(q), bool) if query_valid is None else np.asarray(query_valid)
    key_valid = np.ones(len(k), bool) if key_valid is None else np.asarray(key_valid)
    common = k[key_valid].mean(0)
    y, h = k[key_valid] - common, (np.asarray(h) + scale * k @ common)[key_valid] / epsilon
    own, other = own - common, other - common
    level = np.array([logsumexp(scale * c @ y.T / epsilon + h, 0) for c in own])
    mean = np.array(
        [np.exp(scale * c @ y.T / epsilon + h - v) @ y for c, v in zip(own, level, strict=True)]
    )
    member = ((y[:, None] - other[None]) ** 2).sum(-1).argmin(1)
    rows = []
    for x in q - common:
        tangent = level + scale * ((x - own) * mean).sum(1) / epsilon
        distance = scale * ((x - own) ** 2).sum(1)
        near = np.exp(-distance / 4 - logsumexp(-distance / 4, 0))
        row = [tangent.max(), logsumexp(tangent, 0), near @ tangent, near @ level]
        row = [*(-epsilon * np.array(row)), -distance.min()]
        for log_weight in (h - h.max(), np.zeros(len(y))):
            z = []
            for r in set(member):
                log_mass = logsumexp(log_weight[member == r], 0)
                centre = np.exp(log_weight[member == r] - log_mass) @ y[member == r]
                z.append(scale * x @ centre / epsilon + log_mass)
            z = np.array(z)
            row += list(-epsilon * np.array([z.max(), logsumexp(z, 0), logsumexp(z / 2, 0)]))
        rows.append(row)
    rows = np.array(rows)
    return rows - rows[query_valid].mean(0)


def transport_optimum(a, b):
    """The least mean cost (a - b)^2 / 2 between uniform measures, by linear programming.

    Solved in its dual form: maximise mean f + mean g subject to f_i + g_j <= cost_ij.
    """
    import scipy.optimize

    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    n, m = len(a), len(b)
    cost = (a[:, None] - b[None, :]) ** 2 / 2
    rows = np.zeros((n * m, n + m))
    for row, (i, j) in enumerate(itertools.product(range(n), range(m))):
        rows[row, i] = rows[row, n + j] = 1.0
    objective = -np.concatenate([np.full(n, 1 / n), np.full(m, 1 / m)])
    solution = scipy.optimize.linprog(
        objective, A_ub=rows, b_ub=cost.ravel(), bounds=(None, None), method="highs"
    )
    return -solution.fun


# -------------------------------------------------------------------------------------- fits


def ridge_fit(features, targets, *, ridge, valid=None):
    """(X'X + ridge I)^-1 X'y over the valid rows of every problem."""
    features, targets = np.asarray(features, np.float64), np.asarray(targets, np.float64)
    valid = np.ones(targets.shape, bool) if valid is None else np.broadcast_to(valid, targets.shape)
    x = np.broadcast_to(features, (*targets.shape, features.shape[-1]))[valid]
    y = targets[valid]
    return np.linalg.solve(x.T @ x + ridge * np.eye(x.shape[1]), x.T @ y)


def calibrate(
    q,
    k,
    directions,
    *,
    num_steps,
    ridge,
    scale=None,
    mask=None,
    padding="self",
    epsilon=1.0,
    key_mass="balanced",
    bias=None,
):
    """Least-squares coefficients from activations (..., N, d), all leading axes pooled."""

    def example(q, k, mask, bias):
        s = scores(q, k, scale=scale, bias=bias)
        mask = full_mask(mask, s.shape) & (s > -np.inf)
        query_valid, key_valid = feature_validity(mask, padding)
        f = source_dual(s, num_steps=num_steps, epsilon=epsilon, mask=mask, key_mass=key_mass)
        f = center(f + query_shift(q, scale=scale), query_valid)
        x = sliced_features(
            q, k, directions, scale=scale, query_valid=query_valid, key_valid=key_valid
        )
        return x, f, query_valid

    x, f, valid = batched(example, (q, 2), (k, 2), (mask, 2), (bias, 2))
    return ridge_fit(x, f, ridge=ridge, valid=valid)


def feature_validity(mask, padding):
    """(query_valid, key_valid) of features, centring and regression rows."""
    queries, keys = mask.any(1), mask.any(0)
    if padding == "self" and len(queries) == len(keys):
        return queries & keys, queries & keys
    return queries, keys


def predicted_dual(
    q, k, directions, coefficients, *, side="query", scale=None, query_valid=None, key_valid=None
):
    """The centred dual of one side in cost coordinates, (N,) or (M,)."""
    if side == "key":
        q, k, query_valid, key_valid = k, q, key_valid, query_valid
    x = sliced_features(q, k, directions, scale=scale, query_valid=query_valid, key_valid=key_valid)
    return center(x @ np.asarray(coefficients, np.float64), query_valid)


def compiled_weights(
    q,
    k,
    directions,
    coefficients,
    *,
    num_steps,
    closures,
    scale=None,
    epsilon=1.0,
    mask=None,
    key_mass="balanced",
    padding="self",
    bias=None,
    side="query",
):
    """The compiled layer of one head: features, prediction, shift back, closures."""
    s = scores(q, k, scale=scale, bias=bias)
    mask = full_mask(mask, s.shape) & (s > -np.inf)
    query_valid, key_valid = feature_validity(mask, padding)
    dual = predicted_dual(
        q,
        k,
        directions,
        coefficients,
        side=side,
        scale=scale,
        query_valid=query_valid,
        key_valid=key_valid,
    )
    dual = dual - query_shift(q if side == "query" else k, scale=scale)
    last_step = "row" if num_steps % 2 else "column"
    num_closures = closures if isinstance(closures, int) else ending(closures, last_step)
    return close(
        s, dual, side=side, num_closures=num_closures, epsilon=epsilon, mask=mask, key_mass=key_mass
    )


def sinkhorn_layer(query, key, value, *, bias=None, mask=None, scale=None, **settings):
    """The teacher in the layout of attention functions: (out (B, N, H, dv), weights (B, H, N, M)).

    As many key/value heads as query heads; a bias or mask of the rank of the weights.
    """

    def head(q, k, bias, mask):
        return sinkhorn(scores(q, k, scale=scale, bias=bias), mask=mask, **settings)

    return _layer(head, query, key, value, bias, mask)


def compiled_layer(
    query, key, value, directions, coefficients, *, bias=None, mask=None, **settings
):
    """The compiled layer in the same layout; coefficients (F,)."""

    def head(q, k, bias, mask):
        return compiled_weights(q, k, directions, coefficients, bias=bias, mask=mask, **settings)

    return _layer(head, query, key, value, bias, mask)


def _layer(head, query, key, value, bias, mask):
    q, k, v = (np.swapaxes(np.asarray(x, np.float64), -2, -3) for x in (query, key, value))
    full = (*q.shape[:-1], k.shape[-2])
    bias, mask = (None if x is None else np.broadcast_to(x, full) for x in (bias, mask))
    a = batched(head, (q, 2), (k, 2), (bias, 2), (mask, 2))
    return np.swapaxes(a @ v, -2, -3), a


def kl_objective(
    coefficients, features, target, s, shift, *, epsilon=1.0, key_mass="balanced", mask=None
):
    """F(X w) - <r, X w> of one example, in plan units and without the ridge.

    r are the row masses of the plan closed on the keys from the target, a cost-coordinate dual.
    The keys' part of the cost only adds a constant, so `s - shift` stands for minus the cost.
    """
    mask = full_mask(mask, s.shape) & (s > -np.inf)
    f = features @ coefficients
    keys = mask.any(0)
    mass = 1 / keys.sum() if key_mass == "balanced" else 1 / s.shape[0]
    value, row_mass = 0.0, np.zeros(s.shape[0])
    for j in np.flatnonzero(keys):
        rows = mask[:, j]
        kernel = s[rows, j] - shift[rows]
        log_plan = (kernel + target[rows]) / epsilon
        row_mass[rows] += mass * np.exp(log_plan - logsumexp(log_plan, 0))
        value += epsilon * mass * logsumexp((kernel + f[rows]) / epsilon, 0)
    return value - row_mass @ f


# ----------------------------------------------------------------------------------- metrics


def relative_l2(approximation, reference):
    """|A' - A|_F / |A|_F of one matrix (or of a whole stack, pooled)."""
    return np.linalg.norm(np.ravel(approximation - reference)) / np.linalg.norm(np.ravel(reference))


def row_error(a, query_valid=None):
    """Mean over valid queries of |sum_j A_ij - 1|."""
    error = np.abs(a.sum(-1) - 1)
    return error.mean() if query_valid is None else error[query_valid].mean()


def column_error(a, key_valid=None, target=1.0):
    """Mean over valid keys of |sum_i A_ij - target|."""
    error = np.abs(a.sum(-2) - target)
    return error.mean() if key_valid is None else error[key_valid].mean()
