"""Models of transformers in miniature: tiny configs, random weights, and how they are sharded over ranks.

The weights come from a seed, so every process can make the same model by itself. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCABULARY = 99  # which no number of ranks divides
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LINEARS = {
    "q_proj": ColwiseParallel,
    "k_proj": ColwiseParallel,
    "v_proj": ColwiseParallel,
    "qkv_proj": ColwiseParallel,
    "gate_proj": ColwiseParallel,
    "up_proj": ColwiseParallel,
    "gate_up_proj": ColwiseParallel,
    "o_proj": RowwiseParallel,
    "down_proj": RowwiseParallel,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model to prove: its class and config, and whether its layers are also split by tensor parallelism.

    ``dim`` is the dimension by which FSDP2 splits the matrices.
    """

    name: str
    architecture: str
    config: Callable[[], Any]
    has_tensor_parallelism: bool = False
    dim: int = 0
    dtype: torch.dtype = torch.bfloat16

    @property
    def package_class(self) -> Any:
        """The class in transformers."""
        return getattr(transformers, self.architecture)

    def make(self, *, seed: int = 0) -> Any:
        """The model with random weights, the same in every process."""
        torch.manual_seed(seed)
        model = self.package_class._from_config(self.config(), dtype=self.dtype).eval()
        generator = torch.Generator().manual_seed(seed)
        tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
        with torch.no_grad():
            for tensor in tensors.values():
                if tensor.is_floating_point():
                    tensor.normal_(0.0, 0.2, generator=generator)
        return model

    def make_cast(self, dtype: torch.dtype) -> Any:
        """The same model with its weights rounded to ``dtype``."""
        model = self.package_class._from_config(self.config(), dtype=dtype).eval()
        model.load_state_dict({key: tensor.to(dtype) for key, tensor in self.make().state_dict().items()})
        return model

    def make_empty(self) -> Any:
        """The model without memory, as one makes it to load into."""
        with torch.device("meta"):
            return self.package_class._from_config(self.config(), dtype=self.dtype).eval()

    def shard(self, model: Any, ranks: int) -> None:
        """Split ``model`` by FSDP2, and before that by tensor parallelism where the model is meant to have it."""
        if self.has_tensor_parallelism and ranks % 2 == 0:
            mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("fsdp", "tp"))
            plan = {
                name: _LINEARS[name.rpartition(".")[2]]()
                for name, module in model.named_modules()
                if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in _LINEARS
            }
            assert plan, self.name
            parallelize_module(model, mesh["tp"], plan)
            self._fully_shard(model, mesh["fsdp"])
        else:
            self._fully_shard(model, init_device_mesh("cpu", (ranks,)))

    def _fully_shard(self, model: Any, mesh: DeviceMesh) -> None:
        def placement(parameter: torch.nn.Parameter) -> Shard:
            return Shard(self.dim if parameter.ndim > self.dim and parameter.shape[self.dim] % mesh.size() == 0 else 0)

        layers = [module for module in model.modules() if type(module).__name__.endswith(("Layer", "Block"))]
        for module in [*reversed(layers), model]:  # from the inside out
            fully_shard(module, mesh=mesh, shard_placement_fn=placement)

    def logits(self, model: Any) -> torch.Tensor:
        """What the model answers to a fixed text."""
        tokens = torch.arange(3, 3 + 2 * 16).reshape(2, 16)
        with torch.no_grad():
            found: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
        assert found.isfinite().all(), self.name
        return found


def _deepseek() -> Any:
    return transformers.DeepseekV3Config(
        **{**_TEXT, "num_key_value_heads": 4},
        moe_intermediate_size=16, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=8,
    )  # fmt: skip


def _gemma3() -> Any:
    return transformers.Gemma3TextConfig(**_TEXT, head_dim=8, sliding_window=8, query_pre_attn_scalar=8)


def _gpt_oss() -> Any:
    return transformers.GptOssConfig(
        **_TEXT, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip


def _qwen3_vl() -> Any:
    text = {**_TEXT, "head_dim": 8}
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32,
        "patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)


def _llava() -> Any:
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "image_size": 16, "patch_size": 4, "projection_dim": 16,
    }  # fmt: skip
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision),
        text_config=transformers.LlamaConfig(**_TEXT),
        image_token_index=98,
    )


MODELS = {
    model.name: model
    for model in (
        Model(
            name="llama, tied",
            architecture="LlamaForCausalLM",
            config=lambda: transformers.LlamaConfig(**_TEXT, tie_word_embeddings=True),
            has_tensor_parallelism=True,
        ),
        Model(
            name="qwen3",
            architecture="Qwen3ForCausalLM",
            config=lambda: transformers.Qwen3Config(**_TEXT, head_dim=8),
            dim=1,
        ),
        Model(
            name="qwen3-moe",
            architecture="Qwen3MoeForCausalLM",
            config=lambda: transformers.Qwen3MoeConfig(
                **_TEXT, head_dim=8, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2
            ),
        ),
        Model(
            name="mixtral",
            architecture="MixtralForCausalLM",
            config=lambda: transformers.MixtralConfig(**_TEXT, num_local_experts=4, num_experts_per_tok=2),
            dim=1,
        ),
        Model(name="deepseek-v3", architecture="DeepseekV3ForCausalLM", config=_deepseek, dtype=torch.float32),
        Model(
            name="phi3, fused",
            architecture="Phi3ForCausalLM",
            config=lambda: transformers.Phi3Config(**_TEXT),
            has_tensor_parallelism=True,
        ),
        Model(name="gpt-oss", architecture="GptOssForCausalLM", config=_gpt_oss),
        Model(name="gemma3", architecture="Gemma3ForCausalLM", config=_gemma3, has_tensor_parallelism=True),
        Model(name="llava", architecture="LlavaForConditionalGeneration", config=_llava),
        Model(name="qwen3-vl", architecture="Qwen3VLForConditionalGeneration", config=_qwen3_vl, dim=1),
    )
}
