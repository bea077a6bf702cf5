"""Moesaic rebuilds pretrained language models out of experts.

Importing it makes the converted model types known to ``AutoModelForCausalLM``; nothing heavy is
imported before it is used.

>>> import moesaic
>>> config = moesaic.MoREConfig(active=0.8)
>>> result = moesaic.carve("smollm2", config)  # doctest: +SKIP
"""

import functools
from types import ModuleType
from typing import Any

import lazy_loader
import wrapt

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


@wrapt.when_imported("transformers.models.auto.configuration_auto")
def _register(auto: ModuleType) -> None:
    """Register our model types with transformers when it first reads a config, and never again."""
    original = vars(auto.AutoConfig)["from_pretrained"]

    @functools.wraps(original.__func__)
    def from_pretrained(cls: Any, *args: Any, **options: Any) -> Any:
        auto.AutoConfig.from_pretrained = original
        import moesaic.hub  # noqa: F401

        return cls.from_pretrained(*args, **options)

    auto.AutoConfig.from_pretrained = classmethod(from_pretrained)
