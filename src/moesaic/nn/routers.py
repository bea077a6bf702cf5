"""What chooses a token's petals."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROUTINGS = ("cosine", "random", "linear", "backbone")


class Router(nn.Module):
    """Chooses ``top_k`` petals for each token, from one score a petal. Weights are float32.

    ``cosine``: the petals whose prototypes are most similar to x (MoRE Eqs. 12-13). Rows have norm
    one; the norm of x changes no comparison, so it is not computed.

    ``random``: a fixed pseudo-random choice, uniform over petals and unrelated to what they hold
    (MoRE-Random): the low-order digits of the same products.

    ``linear``: scores are an affine function of x.

    ``backbone``: an affine function of x and of the backbone's hidden activations, which every
    token computes anyway: features of x that are not linear.

    Args:
        hidden_size: D.
        experts: petals R.
        top_k: petals a token runs.
        routing: one of the above.
        backbone: neurons of the backbone, for the routing that looks at them.
    """

    def __init__(
        self,
        hidden_size: int,
        experts: int,
        top_k: int,
        routing: str = "cosine",
        backbone: int = 0,
    ) -> None:
        super().__init__()
        if routing not in ROUTINGS:
            raise ValueError(f"routing {routing!r} is not one of {ROUTINGS}")
        self.sees_backbone = routing == "backbone"
        inputs = hidden_size + (backbone if self.sees_backbone else 0)
        self.weight = nn.Parameter(torch.empty(experts, inputs, dtype=torch.float32))
        if routing in ("linear", "backbone"):
            self.bias = nn.Parameter(torch.empty(experts, dtype=torch.float32))
        else:
            self.register_parameter("bias", None)
        self.top_k = top_k
        self.routing = routing

    def forward(self, x_TD: Tensor, h_TB: Tensor | None = None) -> Tensor:
        """The chosen petals (T, K).

        Args:
            x_TD: the block's input.
            h_TB: the backbone's hidden activations, for the routing that looks at them.
        """
        bias_R = None if self.bias is None else self.bias.float()
        weight = self.weight.float()
        if h_TB is None:
            scores_TR = F.linear(x_TD.float(), weight, bias_R)
        else:
            hidden_size = x_TD.shape[1]
            scores_TR = F.linear(x_TD.float(), weight[:, :hidden_size], bias_R)
            scores_TR = scores_TR + F.linear(h_TB.float(), weight[:, hidden_size:])
        if self.routing == "random":
            scores_TR = torch.frac(scores_TR.abs() * 1e4)
        if self.top_k == 1:
            return scores_TR.argmax(-1, keepdim=True)
        return scores_TR.topk(self.top_k, dim=-1).indices

    def extra_repr(self) -> str:
        experts, inputs = self.weight.shape
        return f"{inputs} -> top-{self.top_k} of {experts}, {self.routing}"


def running(chosen_TK: Tensor, backbone: int, petals: tuple[int, ...]) -> Tensor:
    """Ones for the neurons that a token runs (T, M), zeros for the others; M in carved order.

    >>> running(torch.tensor([[1], [0]]), 1, (1, 2))
    tensor([[1., 0., 1., 1.],
            [1., 1., 0., 0.]])
    """
    widths = torch.tensor(petals, device=chosen_TK.device)
    on_TR = chosen(chosen_TK, len(petals))
    on_TM = on_TR.repeat_interleave(widths, dim=1, output_size=sum(petals))
    return F.pad(on_TM, (backbone, 0), value=1)


def chosen(chosen_TK: Tensor, experts: int) -> Tensor:
    """Ones for the petals that a token runs (T, R), zeros for the others."""
    on_TR = torch.zeros(len(chosen_TK), experts, device=chosen_TK.device)
    return on_TR.scatter_(1, chosen_TK, 1)
