"""Moesaic rebuilds pretrained language models out of experts.

Importing it makes the converted model types known to ``AutoModelForCausalLM``; nothing heavy is
imported before it is used.

>>> import moesaic
>>> config = moesaic.MoREConfig(active=0.8)
>>> result = moesaic.carve("smollm2", config)  # doctest: +SKIP
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import lazy_loader
import wrapt

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


@wrapt.when_imported("transformers.models.auto.configuration_auto")
def _register(auto: ModuleType) -> None:
    """Register our model types with transformers when it first reads a config."""

    def from_pretrained(
        wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        import moesaic.hub  # noqa: F401

        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(auto, "AutoConfig.from_pretrained", from_pretrained)
