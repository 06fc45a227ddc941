"""transformers: what is saved with ``Mapping.from_transformers`` is what transformers itself makes of a model.

One process: ``python integrations/transformers_mappings.py DIRECTORY``. Every operation that has a rule is tried on a
model that is made to have it, with the conversion that ``save_pretrained`` uses.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    LinearToConv3d,
    MergeModulelist,
    PermuteForRope,
    Split,
    Transpose,
    WeightConverter,
    WeightRenaming,
    revert_weight_conversion,
)

import holdfast
from holdfast import Mapping, SaveOptions

SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GATE_UP = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]


def conversions() -> Iterator[list[Any]]:
    """Conversions of a llama, one list for each model that is made."""
    for inverse in (False, True):
        yield [WeightConverter("attn.q.weight", "attn.q_proj.weight", [Interleave(0, inverse=inverse)])]
        yield [WeightConverter("attn.q.weight", "attn.q_proj.weight", [PermuteForRope(inverse=inverse)])]
    yield [WeightConverter("mlp.down.weight", "mlp.down_proj.weight", [Transpose(0, 1)])]
    yield [WeightConverter("mlp.fused.weight", GATE_UP, [Chunk(0)])]
    yield [WeightConverter("mlp.fused.weight", GATE_UP, [Chunk(0), PermuteForRope(permute_layer_names=["gate_proj"])])]
    yield [WeightConverter("attn.kv.weight", ["attn.k_proj.weight", "attn.v_proj.weight"], [Split(0)])]
    yield [WeightConverter(["mlp.a.weight", "mlp.b.weight"], "mlp.down_proj.weight", [Concatenate(1)])]
    yield [WeightRenaming("^model.layers.", "model.layers."), WeightRenaming(".ffn.", ".mlp.")]


def models() -> Iterator[Any]:
    """Models with random weights and conversions of their own, and one with those of its class."""
    for each in conversions():
        model: Any = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True))
        model._weight_conversions = each
        yield model
    yield MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=3))
    model = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=3))
    experts = ["mlp.experts.*.a.weight", "mlp.experts.*.b.weight"]
    model._weight_conversions = [
        WeightConverter(experts, "mlp.experts.gate_up_proj", [MergeModulelist(0), Concatenate(1)]),
        WeightConverter("mlp.experts.down", "mlp.experts.down_proj", [Transpose(1, 2)]),
    ]
    yield model


def main(directory: str) -> str:
    """Compare every model; what was done."""
    count = 0
    for model in models():
        mapping = Mapping.from_transformers(model)
        state = dict(model.state_dict())
        wanted = revert_weight_conversion(
            model, {key: state[key] for key in state if key not in model.all_tied_weights_keys}
        )
        path = f"{directory}/{count}"
        holdfast.save(state, path, options=SaveOptions(mapping=Mapping.from_json(mapping.to_json())))
        with holdfast.open(path) as stored:
            assert {*stored} == {*wanted}, {*stored} ^ {*wanted}
            for key, tensor in wanted.items():
                assert torch.equal(stored[key][...], tensor), key
        count += 1
    model._weight_conversions = [WeightConverter("a.weight", "gate.weight", [LinearToConv3d(1, (1, 1, 1))])]
    refused = ""
    try:
        Mapping.from_transformers(model)
    except ValueError as error:
        refused = str(error)
    assert "Conv3dToLinear" in refused, refused
    return f"{count} models are saved as transformers converts them"


if __name__ == "__main__":
    print(json.dumps({"note": main(sys.argv[1])}))
