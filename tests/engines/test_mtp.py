"""llama.cpp's own multi-token prediction: results load where originals do, and draft as ours."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from builders import APART, BEHIND, predicting, tiny_moe, tiny_tokenizer
from models import MIXTURES, SIZES
from shrunken import small_model
from test_engines import absent
from torch import Tensor

from moesaic import PruneConfig, SlimConfig, TopKConfig
from moesaic.api import verb
from moesaic.config import ExportArgs, MethodConfig
from moesaic.data.text import Tokens
from moesaic.exports.llamacpp import export_gguf
from moesaic.io.source import resolve
from moesaic.metrics.drafts import Drafts
from moesaic.metrics.gguf_engine import F32, library

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]

PROMPT = torch.randint(3, 384, (24,), generator=torch.Generator().manual_seed(2))
VERBS: dict[str, MethodConfig | None] = {
    "as it is": None,
    "prune": PruneConfig(keep=4),
    "slim": SlimConfig(keep=0.5),
    "skip --top-k 1": TopKConfig(top_k=1),
}
SET = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
GET = "_Z26llama_get_embeddings_nextnP13llama_context"
"""Hidden states that such layers take; llama.cpp exports them under no plainer names."""


class Contexts:
    """A model in llama.cpp, and its layers that predict further tokens, as two contexts."""

    def __init__(self, file: Path) -> None:
        self.llama = llama = library()
        given = llama.llama_model_default_params()
        given.load_mtp = True
        self.model = llama.llama_model_load_from_file(str(file).encode(), given)
        assert self.model
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.width = llama.llama_model_n_embd(self.model)

    def context(self, kind: int) -> Any:
        given = self.llama.llama_context_default_params()
        given.n_ctx, given.ctx_type, given.type_k, given.type_v = 128, kind, F32, F32
        given.flash_attn_type = self.llama.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to float16
        made = self.llama.llama_init_from_model(self.model, given)
        assert made, "llama.cpp has no such layers here"
        return made

    def logits(self, context: Any, ids_L: Tensor, hidden_LD: Tensor | None = None) -> Tensor:
        """Logits (L, V) of tokens, and of hidden states beside them."""
        count = len(ids_L)
        batch = self.llama.llama_batch_init(count, 0, 1)
        for i, token in enumerate(ids_L.tolist()):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        batch.n_tokens = count
        if hidden_LD is not None:
            values = hidden_LD.contiguous().numpy()
            batch.embd = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        assert self.llama.llama_decode(context, batch) == 0
        found = self.llama.llama_get_logits(context)
        return torch.from_numpy(np.ctypeslib.as_array(found, (count, self.vocabulary)).copy())

    def drafts(self, ids_L: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the model (L, V), and of its layer that predicts further (L - 1, V)."""
        keep, kept = (self.llama.llama_cpp._lib[name] for name in (SET, GET))
        keep.argtypes = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool]
        kept.argtypes, kept.restype = [ctypes.c_void_p], ctypes.POINTER(ctypes.c_float)
        main = self.context(self.llama.LLAMA_CONTEXT_TYPE_DEFAULT)
        keep(main, True, False)
        logits_LV = self.logits(main, ids_L)
        hidden = np.ctypeslib.as_array(kept(main), (len(ids_L), self.width)).copy()
        further = self.context(self.llama.LLAMA_CONTEXT_TYPE_MTP)
        drafted_LV = self.logits(further, ids_L[1:], torch.from_numpy(hidden)[:-1])
        for made in (further, main):
            self.llama.llama_free(made)
        self.llama.llama_model_free(self.model)
        return logits_LV, drafted_LV


def published(model_type: str, folder: Path) -> Path:
    sizes = {**SIZES, **MIXTURES[model_type]}
    if model_type == "glm4_moe":
        model = tiny_moe(model_type, num_nextn_predict_layers=1, **sizes)
    else:
        model = small_model(model_type, **sizes)
    tiny_tokenizer().save_pretrained(folder)
    return predicting(model, folder, start=BEHIND if model_type == "glm4_moe" else APART)


@torch.no_grad()
@pytest.mark.parametrize("asked", VERBS)
@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen3_next"])
def test_llamacpp_drafts_what_we_do(model_type: str, asked: str, tmp_path: Path) -> None:
    if why := absent("llamacpp"):
        pytest.skip(why)
    folder, config = published(model_type, tmp_path / "base"), VERBS[asked]
    if config is not None:
        ids = torch.randint(3, 384, (16, 64), generator=torch.Generator().manual_seed(1))
        result = verb(config.verb, str(folder), config, calibration=Tokens(ids))
        folder = result.save(tmp_path / "out")
    export_gguf(str(folder), tmp_path / "model.gguf", ExportArgs(to="gguf", type="f32"))
    logits_LV, drafted_LV = Contexts(tmp_path / "model.gguf").drafts(PROMPT)
    source = resolve(str(folder))
    model = source.load(dtype=torch.float32)
    hidden = model.model(PROMPT[None], use_cache=False).last_hidden_state
    (drafter,) = Drafts(source).opened(model)
    _, ours = drafter(hidden, F.pad(PROMPT[None, 1:], (0, 1)))
    torch.testing.assert_close(logits_LV, model(PROMPT[None]).logits[0], atol=1e-3, rtol=0)
    torch.testing.assert_close(drafted_LV, ours[0, :-1], atol=1e-3, rtol=0)
