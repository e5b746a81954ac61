"""Attention scores in plain float64 loops, written from the papers and independent of the library.

q, k, v: float64 tensors (heads, N, head_dim) of one sequence; k and v have as many heads as q. Positions m of queries
and n of keys are 0 .. N-1, or the list `positions`. A score function returns (heads, N, N): every pair of query and
key, visible or not, already times `scale`. Keys after the query go through the same formula; in a decoder they mean
nothing.

Channels i and i + D/2 are a pair, D = 2 * len(theta); channels from D on have no position. `turn` rotates a pair (x, y)
to (x cos a - y sin a, x sin a + y cos a); as x + jy, that is times exp(ja). A factor of cos and sin scales turned
channels only. `place(m, n)` gives the positions a pair is scored at (`streaming_positions` where there are sinks); what
depends on the length so far (dynamic schedules, log-n) takes it from the query's own place in the text, m + 1, or from
`reach`, how many tokens a query sees at most, where that is less.
"""

import math

import reference
import torch


def as_it_stands(m, n):
    return m, n


def turn(x, angles, factor=1.0):
    """x (..., head_dim) with pair i turned by angles[i] radians, turned channels times factor."""
    angles = torch.as_tensor(angles, dtype=torch.float64)
    cos, sin, half = angles.cos() * factor, angles.sin() * factor, len(angles)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, first * sin + second * cos, rest), dim=-1)


def pairs(length, positions=None, place=as_it_stands):
    """Row and column of every pair of tokens, and the positions that it is scored at."""
    positions = range(length) if positions is None else positions
    for row, m in enumerate(positions):
        for column, n in enumerate(positions):
            yield row, column, *place(m, n)


def every_pair(q, k, score, **where):
    """score(q_m, k_n, m, n) of every pair; q_m and k_n are (heads, head_dim), the answer is (heads,)."""
    heads, length = q.shape[:2]
    out = torch.empty(heads, length, length, dtype=torch.float64)
    for row, column, m, n in pairs(length, **where):
        out[:, row, column] = score(q[:, row], k[:, column], m, n)
    return out


def dot(x, y):
    return (x * y).sum(-1)


# qk seam. A schedule maps the length so far to (theta, factor of cos and sin).


def by_length(q, k, scale, schedule, positions=None, place=as_it_stands, reach=math.inf):
    """Query and keys both rotated with the schedule of the length at that query, m + 1, at most `reach`."""
    heads, length = q.shape[:2]
    positions = range(length) if positions is None else positions
    schedules = [schedule(min(m + 1, reach)) for m in positions]
    out = torch.empty(heads, length, length, dtype=torch.float64)
    for row, column, m, n in pairs(length, positions, place):
        theta, factor = schedules[row]
        query = turn(q[:, row], [m * t for t in theta], factor)
        key = turn(k[:, column], [n * t for t in theta], factor)
        out[:, row, column] = dot(query, key) * scale
    return out


def rotary(q, k, scale, theta, factor=1.0, **where):
    return by_length(q, k, scale, lambda length: (theta, factor), **where)


def stepped(length, trained, step=1):
    """The length that counts: as it is up to trained, above it rounded up to trained + a multiple of step."""
    if length <= trained:
        return length
    return trained + math.ceil((length - trained) / step) * step


def dynamic_schedule(length, d, base, trained, s, step=1):
    length = stepped(length, trained, step)
    if length > trained:
        base = base * (s * length / trained - (s - 1)) ** (d / (d - 2))
    return reference.rope(d, base, trained)


def dynamic(q, k, scale, d, base, trained, s, step=1, **where):
    return by_length(q, k, scale, lambda length: dynamic_schedule(length, d, base, trained, s, step), **where)


def dynamic_yarn_schedule(length, d, base, trained, step=1, beta_fast=32, beta_slow=1):
    s = max(1.0, stepped(length, trained, step) / trained)
    return reference.yarn(d, base, trained, s, beta_fast, beta_slow)


def dynamic_yarn(q, k, scale, d, base, trained, step=1, beta_fast=32, beta_slow=1, **where):
    def schedule(length):
        return dynamic_yarn_schedule(length, d, base, trained, step, beta_fast, beta_slow)

    return by_length(q, k, scale, schedule, **where)


def longrope_schedule(length, d, base, trained, short, long, s):
    return reference.longrope(d, base, trained, s, short if length <= trained else long)


def longrope_exact(q, k, scale, d, base, trained, short, long, s, **where):
    return by_length(q, k, scale, lambda length: longrope_schedule(length, d, base, trained, short, long, s), **where)


def xpos(q, k, scale, d, base, scale_base=512, **where):
    theta = reference.rope(d, base, 0)[0]
    zeta = [(2 * i / d + 0.4) / 1.4 for i in range(d // 2)]

    def score(x, y, m, n):
        decay = torch.ones(x.shape[-1], dtype=torch.float64)
        for i in range(d // 2):
            decay[i] = decay[i + d // 2] = zeta[i] ** ((m - n) / scale_base)
        return dot(decay * turn(x, [(m - n) * t for t in theta]), y) * scale

    return every_pair(q, k, score, **where)


def comay(q, k, scale, w, phi, **where):
    """w, phi: frequency and phase of each pair, lists of D/2."""
    half = len(w)
    w, phi = torch.as_tensor(w, dtype=torch.float64), torch.as_tensor(phi, dtype=torch.float64)

    def score(x, y, m, n):
        query = torch.complex(x[:, :half], x[:, half : 2 * half]) * torch.exp(1j * (m * w + phi))
        key = torch.complex(y[:, :half], y[:, half : 2 * half]) * torch.exp(1j * n * w)
        return (dot(query, key.conj()).real + dot(x[:, 2 * half :], y[:, 2 * half :])) * scale

    return every_pair(q, k, score, **where)


# scores seam. First the methods that rotate by another distance than m - n.


def at_distance(q, k, scale, theta, distance, **where):
    """The score of a query that many tokens ahead of its key: distance(m, n), no factor of cos and sin."""

    def score(x, y, m, n):
        return dot(turn(x, [distance(m, n) * t for t in theta]), y) * scale

    return every_pair(q, k, score, **where)


def self_extend_distance(m, n, window, group):
    if m - n < window:
        return m - n
    return m // group - n // group + window - window // group


def self_extend(q, k, scale, theta, window, group, **where):
    return at_distance(q, k, scale, theta, lambda m, n: self_extend_distance(m, n, window, group), **where)


def rerope_distance(m, n, w):
    return min(m - n, w)


def leaky_rerope_distance(m, n, w, leak):
    return m - n if m - n <= w else w + (m - n - w) / leak


def log_n_scaled(scores, log_n, positions=None, reach=math.inf):
    """Scores of query m times max(1, log(m + 1) / log(log_n)); log_n is the trained length, None: as they are."""
    if log_n is None:
        return scores
    positions = range(scores.shape[1]) if positions is None else positions
    factors = [max(1.0, math.log(min(m + 1, reach)) / math.log(log_n)) for m in positions]
    return scores * torch.tensor(factors, dtype=torch.float64)[:, None]


def rerope(q, k, scale, theta, w, log_n=None, reach=math.inf, **where):
    scores = at_distance(q, k, scale, theta, lambda m, n: rerope_distance(m, n, w), **where)
    return log_n_scaled(scores, log_n, where.get("positions"), reach)


def leaky_rerope(q, k, scale, theta, w, leak, log_n=None, reach=math.inf, **where):
    scores = at_distance(q, k, scale, theta, lambda m, n: leaky_rerope_distance(m, n, w, leak), **where)
    return log_n_scaled(scores, log_n, where.get("positions"), reach)


def dca_distance(m, n, s, w):
    """s: the largest position a key is looked at from, w: tokens kept exact across a border of chunks of s - w."""
    chunk = s - w
    apart = m // chunk - n // chunk
    if apart == 0:
        query = m % chunk
    elif apart == 1:
        query = min(m % chunk + chunk, s)
    else:
        query = min(2 * chunk - 1, s)
    return query - n % chunk


def dca(q, k, scale, theta, s, w, **where):
    return at_distance(q, k, scale, theta, lambda m, n: dca_distance(m, n, s, w), **where)


def shaw_row(m, n, clip):
    """The row of a table of 2 * clip + 1 vectors: keys before the query in its first half."""
    return max(-clip, min(clip, n - m)) + clip


def shaw(q, k, scale, table, **where):
    """table: (2K + 1, head_dim), one for all heads."""

    def score(x, y, m, n):
        return (dot(x, y) + dot(x, table[shaw_row(m, n, len(table) // 2)])) * scale

    return every_pair(q, k, score, **where)


def shaw_output(weights, v, table, **where):
    """weights (heads, N, N) after softmax; each value vector plus table's (2K + 1, head_dim) vector of its distance."""
    out = torch.zeros_like(v)
    for row, column, m, n in pairs(v.shape[1], **where):
        value = v[:, column] + table[shaw_row(m, n, len(table) // 2)]
        out[:, row] += weights[:, row, column, None] * value
    return out


def transformer_xl(q, k, scale, u, v, w, d_model, **where):
    """u, v: (heads, head_dim), w: (heads, head_dim, d_model)."""

    def score(x, y, m, n):
        relative = w @ sinusoidal(m - n, d_model)
        return (dot(x + u, y) + dot(x + v, relative)) * scale

    return every_pair(q, k, score, **where)


def cope(q, k, scale, table, seen=None):
    """table: (P, head_dim), positions up to P - 1 whatever the text. Keys that `seen` (N, N) hides are not counted."""
    heads, length = q.shape[:2]
    out = torch.empty(heads, length, length, dtype=torch.float64)
    for m in range(length):
        content = [scale * dot(q[:, m], k[:, n]) for n in range(length)]
        gates = [content[n].sigmoid() * (seen is None or float(seen[m, n])) for n in range(length)]
        for n in range(length):
            position = sum(gates[n : m + 1], torch.zeros(heads, dtype=torch.float64)).clamp(max=len(table) - 1)
            below, above = table[position.floor().long()], table[position.ceil().long()]
            share = (position - position.floor())[:, None]
            out[:, m, n] = content[n] + dot(q[:, m], (1 - share) * below + share * above)
    return out


# embedding seam


def sinusoidal(position, d):
    out = torch.empty(d, dtype=torch.float64)
    for i in range(d // 2):
        angle = position / 10000 ** (2 * i / d)
        out[2 * i], out[2 * i + 1] = math.sin(angle), math.cos(angle)
    return out


def fourier(position, w):
    """w: frequencies in radians per token; len(w) cosines, then as many sines."""
    angles = [float(frequency) * position for frequency in w]
    return torch.tensor([*map(math.cos, angles), *map(math.sin, angles)], dtype=torch.float64)


# what a query sees, and what comes out


def visible(length, causal=True, window=None, sinks=0, global_tokens=()):
    """(N, N) bool, rows are queries. A window of w tokens has the query's own token in it."""
    out = torch.zeros(length, length, dtype=torch.bool)
    for m in range(length):
        for n in range(length):
            near = window is None or abs(m - n) < window
            kept = n < sinks or n in global_tokens or m in global_tokens
            out[m, n] = (near or kept) and (n <= m or not causal)
    return out


def streaming_positions(m, n, window, sinks):
    """Positions a pair is scored at when they count inside the kept cache: the sinks, then the window."""
    if n < sinks and m - n >= window:
        return min(m, window + sinks - 1), n
    return m, n


def softmax(scores, seen):
    """(heads, N, N), zero where `seen` (N, N) is false and in rows that see nothing."""
    out = torch.zeros_like(scores)
    for m in range(scores.shape[1]):
        keys = seen[m].nonzero()[:, 0]
        if len(keys):
            out[:, m, keys] = scores[:, m, keys].softmax(dim=-1)
    return out


def attention(scores, v, seen):
    """(heads, N, head_dim)"""
    return softmax(scores, seen) @ v
