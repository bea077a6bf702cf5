"""torch.compile around carved layers: the same values, and no compiling anew for every split."""

import pytest
import torch
from test_hub import carved_model
from torch import nn
from torch._dynamo.utils import counters

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@torch.no_grad()
def test_no_split_of_the_tokens_is_compiled_anew():
    ffn = carved_model().model.layers[1].mlp
    block = nn.Sequential(nn.LayerNorm(32), ffn, nn.Linear(32, 32))
    compiled = torch.compile(block, backend="eager")
    generator = torch.Generator().manual_seed(0)
    for length in (1, 24, 24, 24, 17, 9, 30, 31, 32, 33, 34, 35, 1):
        x = torch.randn(1, length, 32, generator=generator)
        torch.testing.assert_close(compiled(x), block(x))
    assert counters["stats"]["unique_graphs"] <= 6  # before and after; one token, 24, any number


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_model_generates_the_same():
    model = carved_model()
    compiled = torch.compile(model)
    ids = torch.randint(1, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits
    )
