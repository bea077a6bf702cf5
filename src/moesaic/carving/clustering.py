"""Spectral clustering of large affinity matrices, and cluster sizes within bounds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

LARGE = 1 << 18
"""Members times dimensions above which eigenvectors come by blocks, and k-means starts once."""


def affinity_degree(affinity_MM: Tensor, members: Tensor) -> Tensor:
    """Return each member's degree among the members: row sums without the diagonal."""
    on_M = torch.zeros(len(affinity_MM), device=affinity_MM.device)
    on_M[members] = 1
    return (affinity_MM @ on_M - affinity_MM.diagonal())[members].double()


def spectral_embedding(affinity_MM: Tensor, members: Tensor, dims: int, seed: int) -> np.ndarray:
    """Return the leading eigenvectors of D^-1/2 C D^-1/2, rows of norm one (len(members), dims).

    Ng, Jordan & Weiss (2001), on the zero-diagonal sub-matrix of ``members``, each of which has
    some affinity. By Lanczos iteration, or by subspace iteration if the matrix and the number of
    vectors are large: both only multiply by the matrix, and no copy of it is made.
    """
    from scipy.sparse.linalg import LinearOperator, eigsh

    device, size, count = affinity_MM.device, len(affinity_MM), len(members)
    diagonal = affinity_MM.diagonal()[members].double()
    scale = affinity_degree(affinity_MM, members).rsqrt()

    def matmul(V_NK: Tensor) -> Tensor:
        scaled = scale[:, None] * V_NK.double()
        padded = torch.zeros(size, V_NK.shape[1], dtype=affinity_MM.dtype, device=device)
        padded[members] = scaled.to(affinity_MM.dtype)
        product = (affinity_MM @ padded)[members].double() - diagonal[:, None] * scaled
        return scale[:, None] * product

    def matvec(v: np.ndarray) -> np.ndarray:
        scaled = scale * torch.from_numpy(v.ravel()).to(device)
        padded = torch.zeros(size, dtype=affinity_MM.dtype, device=device)
        padded[members] = scaled.to(affinity_MM.dtype)
        product = (affinity_MM @ padded)[members].double() - diagonal * scaled
        return np.asarray((scale * product).cpu())

    if count <= 2 * dims + 2:  # too small for Lanczos
        columns = [matvec(unit) for unit in np.eye(count)]
        vectors = np.linalg.eigh(np.stack(columns, axis=1))[1][:, -dims:]
    elif count * dims > LARGE:
        vectors = leading(matmul, count, dims, seed, device).cpu().numpy()
    else:
        start = np.random.default_rng(seed).standard_normal(count)
        operator = LinearOperator((count, count), matvec=matvec, dtype=np.float64)
        vectors = eigsh(operator, k=dims, which="LA", v0=start, tol=1e-6)[1]
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(norms, 1e-12))


def leading(
    matmul: Callable[[Tensor], Tensor],
    count: int,
    dims: int,
    seed: int,
    device: torch.device,
    rounds: int = 12,
) -> Tensor:
    """Return approximate leading eigenvectors of a matrix with eigenvalues in [-1, 1] (count,
    dims).

    Subspace iteration on the matrix plus identity: a few products with a block of vectors instead
    of hundreds with one. Clustering needs the space they span, not each of them to many digits.
    """
    generator = torch.Generator().manual_seed(seed)
    Q_NK = torch.randn(count, min(count, dims + 8), generator=generator, dtype=torch.float64)
    Q_NK = torch.linalg.qr(Q_NK.to(device))[0]
    for _ in range(rounds):
        Q_NK = torch.linalg.qr(matmul(Q_NK) + Q_NK)[0]
    ritz_KK = torch.linalg.eigh(Q_NK.T @ matmul(Q_NK))[1]
    return Q_NK @ ritz_KK[:, -dims:]


def cluster(points: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return k-means labels and squared distances to every centre (points, count)."""
    from sklearn.cluster import KMeans

    starts = 1 if points.size > LARGE else 10
    fitted = KMeans(count, n_init=starts, random_state=seed).fit(points)
    return fitted.labels_, fitted.transform(points) ** 2


def fill(distance_NR: np.ndarray, least: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Assign each point to a near cluster so that cluster sizes are within bounds.

    Points choose in the order of the cost of their second choice; then clusters below ``least``
    take the points whose distance rises least.

    >>> d = np.array([[0.0, 1.0], [0.0, 5.0], [0.0, 3.0], [2.0, 0.0]])
    >>> fill(d, np.array([2, 2]), np.array([2, 2])).tolist()
    [1, 0, 0, 1]
    """
    count, clusters = distance_NR.shape
    if clusters == 1:
        return np.zeros(count, dtype=np.int64)
    ranked = np.sort(distance_NR, axis=1)
    room = most.copy()
    label = np.full(count, -1)
    for point in np.argsort(ranked[:, 0] - ranked[:, 1], kind="stable"):
        choice = np.where(room > 0, distance_NR[point], np.inf).argmin()
        label[point] = choice
        room[choice] -= 1
    sizes = np.bincount(label, minlength=clusters)
    for needy in np.flatnonzero(sizes < least):
        while sizes[needy] < least[needy]:
            spare = sizes[label] > least[label]
            loss = distance_NR[:, needy] - distance_NR[np.arange(count), label]
            point = np.where(spare, loss, np.inf).argmin()
            sizes[label[point]] -= 1
            sizes[needy] += 1
            label[point] = needy
    return label
