"""Helpers shared by the methods that make a mixture of experts smaller."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from moesaic.arch.dense import PREFIX
from moesaic.arch.lookup import moe_arch
from moesaic.arch.mixture import MoEArch
from moesaic.arch.routing import RoutingFunction
from moesaic.errors import MoesaicError
from moesaic.observation.job import Job
from moesaic.surgery import headers_of
from moesaic.types import Config


def original(config: Config, instead: str) -> MoEArch:
    """Return the architecture of a mixture of experts that was not converted before.

    Raises:
        MoesaicError: the model was converted (the message ends with ``instead``), or is no known
            mixture of experts.
    """
    if config.model_type.startswith(PREFIX):
        raise MoesaicError(f"{config.model_type} was reduced already; {instead}.")
    return moe_arch(config)


def unskipped(config: Config) -> MoEArch:
    """Return the architecture of a mixture of experts whose routers skip no experts.

    Raises:
        MoesaicError: the model skips already, or is no known mixture of experts.
    """
    if any("beta" in header for stack in headers_of(config).values() for header in stack):
        raise MoesaicError("This model skips already; start from the one it was made from.")
    return moe_arch(config)


def routing_of(job: Job[MoEArch], layer: int, stats: Mapping[str, Tensor]) -> RoutingFunction:
    """Return a layer's routing function, ready to decide on recorded logits.

    Args:
        job: the model.
        layer: index of the layer, which may be closed.
        stats: its statistics, with ``bias_E``.
    """
    routing = job.arch.mixture(job.layers[layer]).routing
    start = f"{job.arch.layer_prefix(layer)}{job.arch.inside}"
    routing.fill(lambda name, _: job.naming.read(start + name))
    if routing.bias_E is not None and "bias_E" in stats:
        routing.bias_E = stats["bias_E"]
    return routing


def least_experts(arch: MoEArch, top_k: int, config: Config) -> int:
    """Return the fewest experts that a router can work with: the top-k, spread over its groups."""
    groups = arch.group_count(config)
    if groups == 1:
        return top_k
    open_groups = min(getattr(config, "topk_group", None) or groups, groups)
    least = max(top_k, groups * arch.per_group, -(-top_k // open_groups) * groups)
    return least + -least % groups


def span(counts: Collection[int]) -> str:
    """Return the least and the greatest of some numbers as a range; "0" without numbers.

    >>> span([6, 4]), span([8, 8]), span([])
    ('4–6', '8', '0')
    """
    least, most = min(counts, default=0), max(counts, default=0)
    return f"{least}" if least == most else f"{least}–{most}"


def listed(numbers: Sequence[int]) -> str:
    """Return layer indices in words.

    >>> listed([1]), listed([0, 2, 5]), listed([])
    ('layer 1', 'layers 0, 2 and 5', 'no layer')
    """
    if not numbers:
        return "no layer"
    *first, last = map(str, numbers)
    return f"layers {', '.join(first)} and {last}" if first else f"layer {last}"
