"""The GPU kernel of channel skipping: in Triton's interpreter, and compiled for GPUs by name.

`make test-triton`: Triton is no part of torch's CPU build, and is interpreted from the start of a
process or not at all.
"""

from __future__ import annotations

import os

import pytest
import torch

from moesaic.nn import kernels

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="not Triton's interpreter"
)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 7, 5), (3, 300, 130), (8, 33, 64)])
def test_a_product_is_that_of_the_chosen_channels(dtype, tokens, inputs, outputs):
    from moesaic.nn.kernels import gpu

    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(tokens, inputs, generator=generator).to(dtype)
    rows = torch.randn(3, inputs, outputs, generator=generator).to(dtype)
    scale = torch.rand(3, inputs, generator=generator) + 0.1
    group = torch.randint(0, 3, (tokens,), generator=generator)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.2}
    for keep, threshold in ((inputs // 2, 0.0), (0, 0.0), (inputs, 0.0), (-1, 0.5), (-1, 1e9)):
        on = kernels.chosen(x, scale[group], keep, threshold)
        wanted = torch.einsum("ti,tio->to", (x * on).float(), rows[group].float())
        found = kernels.by_triton(gpu, x, rows, scale, keep, threshold, group)
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), wanted, **close)
    wanted = torch.einsum("ti,io->to", x.float(), rows[0].float())
    for scale_or_none, threshold in ((None, 0.0), (scale[0], -1.0)):
        found = kernels.by_triton(gpu, x, rows[0], scale_or_none, -1, threshold, None)
        torch.testing.assert_close(found.float(), wanted, **close)


@interpreted
def test_a_row_that_is_left_out_is_never_loaded():
    """What it holds does not matter: zero times infinity would."""
    from moesaic.nn.kernels import gpu

    rows = torch.ones(4, 8)
    rows[1] = torch.inf
    rows[3] = torch.nan
    x = torch.tensor([[2.0, 0.1, 3.0, -0.1]])
    assert gpu.sums(x, rows, None, 0.5, None).tolist() == [[5.0] * 8]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("scaled", "grouped"), [(False, False), (True, True)])
@pytest.mark.parametrize("capability", [80, 90])
def test_it_compiles_for_a_gpu(dtype, scaled, grouped, capability):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from moesaic.nn.kernels import gpu

    signature = {
        "x": f"*{dtype}",
        "scale": "*fp32" if scaled else f"*{dtype}",
        "rows": f"*{dtype}",
        "group": "*i64" if grouped else f"*{dtype}",
        "out": "*fp32",
        "threshold": "fp32",
        "inputs": "i32",
        "outputs": "i32",
    }
    constants = {
        "scaled": scaled,
        "grouped": grouped,
        "part": gpu.PART,
        "block_i": gpu.BLOCK_I,
        "block_o": gpu.BLOCK_O,
    }
    types = {**signature, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(gpu.partial_sums, types, constants)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert "ld.global" in built.asm["ptx"]
    assert "atom" not in built.asm["ptx"]
