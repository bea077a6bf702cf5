"""MoRE: Mixture of Recognized Experts, dense to MoE without training.

Zhang et al., "Less Prune, MoRE Experts: Recognizing and Restructuring Latent Experts for Model
Compression". Equation numbers are the paper's.

==================  ==========================================================
x, h                FFN input (T, D), input of the down projection (T, M)
S(t), k_act         activated channels of a token, their number (Eq. 4)
f, C                channel frequency, co-activation (Eqs. 5, 6)
s                   global importance of a channel (Eq. 7)
C_share             backbone: the channels every token runs
S_i, r              petals: a partition of the other channels, their number
E_i                 expert: S_i and C_share
A(h, E_i)           expert energy (Eq. 9)
T_i, mu_i           calibration tokens of an expert, their centroid (Eqs. 10, 11)
==================  ==========================================================

Deviations, and choices where the paper gives none:

- Gated FFNs: h is the true input of the down projection, act(gate) * up, and experts keep their
  gate rows. The paper ignores the gate; dropping it would break the model.
- rho_act = 0.1 and alpha = 0.5 are not given in the paper. Both are options.
- Petals have equal sizes by default (``balanced``), which native architectures need. Otherwise
  k-means sizes, clamped to half and one and a half times the mean. No channel is dropped.
- Channels that are never activated together with another are put into the smallest petal.
- An expert that no token prefers takes the centroid of its highest-energy tokens.
- ``router`` and ``refit`` are not in the paper: see the last section here, and docs/beyond.md.
  Their defaults are the paper's method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.arch.dense import DenseFFN
from moesaic.modules.running import LayerTokens
from moesaic.plans.recovery import Ridge

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
) -> Tensor:
    """Return approximate leading eigenvectors of a matrix with eigenvalues in [-1, 1] (count,
    dims).

    Subspace iteration on the matrix plus identity: a few products with a block of vectors instead
    of hundreds with one. Clustering needs the space they span, not each of them to many digits.
    """
    generator = torch.Generator().manual_seed(seed)
    Q_NK = torch.randn(count, min(count, dims + 8), generator=generator, dtype=torch.float64)
    Q_NK = torch.linalg.qr(Q_NK.to(device))[0]
    for _ in range(12):
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


COVERAGE = (0.1, 0.01, 0.001, 0.0005)
"""Shares of the channels for which Table 4's never-activated ratio is reported."""


# --- Sums over tokens: Eqs. 4 to 7 ---------------------------------------------------------------


def activated(h_TM: Tensor, ratio: float) -> Tensor:
    """Return S(t), Eq. 4: the k_act channels of largest magnitude of each token, largest first (T,
    k_act).

    >>> activated(torch.tensor([[0.1, -3.0, 2.0, 0.0]]), ratio=0.5)
    tensor([[1, 2]])
    """
    k_act = max(1, int(ratio * h_TM.shape[1]))
    return h_TM.abs().topk(k_act, dim=1).indices


def add_coactivation(into_MM: Tensor, channels_TK: Tensor, block: int = 4096) -> None:
    """Add N C, Eq. 6: how many tokens activate both channels; its diagonal is N f, Eq. 5.

    Upper blocks only: those below the diagonal are zero until :func:`mirror`. Counts in float32 are
    exact up to 2^24 tokens.

    >>> C = torch.zeros(3, 3)
    >>> add_coactivation(C, torch.tensor([[0, 1], [1, 2]])); C.tolist()
    [[1.0, 1.0, 0.0], [1.0, 2.0, 1.0], [0.0, 1.0, 1.0]]
    """
    tokens, width = len(channels_TK), into_MM.shape[0]
    on_TM = torch.zeros(tokens, width, device=into_MM.device)
    on_TM.scatter_(1, channels_TK, 1)
    for row in range(0, width, block):
        rows = slice(row, row + block)
        into_MM[rows, row:].addmm_(on_TM[:, rows].T, on_TM[:, row:])


def mirror(upper_MM: Tensor, block: int = 4096) -> Tensor:
    """Fill the blocks below the diagonal from those above, in place."""
    for row in range(0, upper_MM.shape[0], block):
        stop = row + block
        upper_MM[stop:, row:stop] = upper_MM[row:stop, stop:].T
    return upper_MM


def importance(ffn: DenseFFN, x_square_D: Tensor, h_square_M: Tensor) -> Tensor:
    """Return s, Eq. 7: s_j = sum_i |W_up[j,i]| E[x_i^2] + sum_k |W_down[k,j]| E[h_j^2] (M,)."""
    up_MD, down_DM = ffn.up_MD.double().abs(), ffn.down_DM.double().abs()
    return up_MD @ x_square_D + down_DM.sum(0) * h_square_M


# --- Petals: spectral clustering of the residual co-activation -----------------------------------


def petals_of(
    coactivation_MM: Tensor, members: Tensor, experts: int, balanced: bool, seed: int
) -> list[Tensor]:
    """Return S_1 ... S_r: a partition of ``members`` by how often channels are activated together.

    Args:
        coactivation_MM: how many tokens activate both channels.
        members: the channels to divide.
        experts: number of petals r.
        balanced: True for petals of equal size.
        seed: seed of the clustering.
    """
    if experts == 1:
        return [members]
    connected = (affinity_degree(coactivation_MM, members) > 0).cpu().numpy()
    label = np.full(len(members), -1)
    mean = len(members) / experts
    if balanced:
        least, most = np.full(experts, int(mean)), np.full(experts, int(np.ceil(mean)))
    else:
        least, most = np.full(experts, int(0.5 * mean)), np.full(experts, int(1.5 * mean))
    if connected.sum() >= experts:
        tied = members[torch.from_numpy(connected).to(members.device)]
        points = spectral_embedding(coactivation_MM, tied, experts, seed)
        labels, distance = cluster(points, experts, seed)
        fits = np.bincount(labels, minlength=experts)
        within = not balanced and (fits >= least).all() and (fits <= most).all()
        none = np.zeros(experts, dtype=int)
        label[connected] = labels if within else fill(distance, none, most)
    sizes = np.bincount(label[label >= 0], minlength=experts)
    for channel in np.flatnonzero(label < 0):  # isolated: to the smallest petal
        label[channel] = sizes.argmin()
        sizes[label[channel]] += 1
    if not balanced or (sizes < least).any():
        label = fill((label[:, None] != np.arange(experts)).astype(float), least, most)
    return [members[torch.from_numpy(label == e).to(members.device)] for e in range(experts)]


# --- Prototypes: Eqs. 9 to 11 --------------------------------------------------------------------


def memberships(backbone: Tensor, petals: Sequence[Tensor], width: int) -> Tensor:
    """Return E_i = S_i and C_share as columns of zeros and ones (M, R)."""
    member_MR = torch.zeros(width, len(petals), device=backbone.device)
    member_MR[backbone] = 1
    for i, petal in enumerate(petals):
        member_MR[petal, i] = 1
    return member_MR


def energies(h_TM: Tensor, member_MR: Tensor, alpha: float) -> Tensor:
    """Return A(h, E_i), Eq. 9: ||h on E_i||_2 / |E_i|^alpha (T, R).

    >>> experts = memberships(torch.tensor([0]), [torch.tensor([1]), torch.tensor([2])], 3)
    >>> energies(torch.tensor([[3.0, 4.0, 0.0]]), experts, alpha=0.0)
    tensor([[5., 3.]])
    """
    return (h_TM.float().square() @ member_MR).sqrt() / member_MR.sum(0) ** alpha


def prototypes(site: LayerTokens[DenseFFN], member_MR: Tensor, alpha: float) -> Tensor:
    """Return mu_i, Eqs. 10 and 11, of norm one: the directions that the router compares x with (R,
    D).

    Args:
        site: the layer and its tokens.
        member_MR: the experts' neurons as columns of zeros and ones.
        alpha: exponent of Eq. 9.
    """
    experts = member_MR.shape[1]
    keep = max(1, site.tokens // (100 * experts))
    hidden_size = site.view.up_MD.shape[1]
    sum_RD = torch.zeros(experts, hidden_size, dtype=torch.float64, device=member_MR.device)
    count_R = torch.zeros(experts, device=member_MR.device)
    best: list[tuple[Tensor, Tensor]] = []  # energies and inputs of each expert's top tokens
    for x_TD, h_TM in site.activations():
        energy_TR = energies(h_TM, member_MR, alpha)
        assigned_TR = F.one_hot(energy_TR.argmax(1), experts).double()
        sum_RD += assigned_TR.T @ x_TD.double()
        count_R += assigned_TR.sum(0)
        top = energy_TR.topk(min(keep, len(energy_TR)), dim=0)
        best.append((top.values, x_TD[top.indices]))
    for i in torch.nonzero(count_R == 0).flatten().tolist():
        values = torch.cat([v[:, i] for v, _ in best])
        candidates = torch.cat([x[:, i] for _, x in best]).double()
        sum_RD[i] = candidates[values.topk(min(keep, len(values))).indices].sum(0)
    return F.normalize(sum_RD, dim=1).float()  # a centroid's length changes no cosine


# --- Not in the paper: a router in closed form ---------------------------------------------------
#
# A router should find the petals whose removal changes the output most. By the squared triangle
# inequality that is about their weighted energy
#
#     A_e(t) = sqrt(sum over j in petal e of (h_j(t) ||W_down[:, j]||)^2),
#
# so a linear function of x is fitted to it by least squares over calibration tokens, and a token
# runs the top-k petals of it. There is no constant: the normalised x has directions that hardly
# vary, and native routers have no bias.


def neuron_weights(ffn: DenseFFN) -> Tensor:
    """Return ||W_down[:, j]||_2, the size of a neuron's output for h_j = 1 (M,)."""
    return ffn.down_DM.float().norm(dim=0)


def petal_energies(h_TM: Tensor, norm_M: Tensor, petals: Sequence[Tensor]) -> Tensor:
    """Return A, the weighted energy of each petal for each token (T, R).

    >>> one, two = torch.tensor([0]), torch.tensor([1, 2])
    >>> petal_energies(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([5.0, 1.0, 2.0]), [one, two])
    tensor([[5., 5.]])
    """
    member_MR = memberships(petals[0][:0].to(h_TM.device), petals, len(norm_M))
    return energies(h_TM.float() * norm_M, member_MR, alpha=0)


def fit_router(site: LayerTokens[DenseFFN], petals: Sequence[Tensor]) -> Tensor:
    """Return the weight of a layer's router (R, D), float32, by ridge regression on its tokens."""
    norm_M = neuron_weights(site.view)
    ridge = Ridge(site.view.up_MD.shape[1], len(petals), site.view.device)
    for x_TD, h_TM in site.activations():
        ridge.add(x_TD.float(), petal_energies(h_TM, norm_M, petals))
    return ridge.solve().weight_FO.T.float().cpu().contiguous()
