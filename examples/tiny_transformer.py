"""What the examples on several ranks train: a transformer small enough for a CPU, and data that it can learn.

Every example builds the same model and sees the same global batches, however many ranks share the work; so all of them
have the same losses up to rounding, and each can resume what another has saved. Nothing here knows of checkpoints.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

VOCABULARY = 64
HEAD_WIDTH = 16
SEQUENCES = 8
LENGTH = 16


class Block(nn.Module):
    """Attention and a feed-forward layer. It works on as many heads as its own part of the weights has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """One layer further."""
        normed = self.attention_norm(hidden)
        query, key, value = (
            projection(normed).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(mixed.transpose(1, 2).flatten(2))
        expanded = functional.gelu(self.up(self.feed_forward_norm(hidden)))
        result: torch.Tensor = hidden + self.down(expanded)
        return result


class Transformer(nn.Module):
    """Predicts the next token. The weights are the same in every process."""

    def __init__(self, *, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.embedding = nn.Embedding(VOCABULARY, width)
            self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of the token after each one."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def batch(source: torch.Generator, part: int, parts: int) -> torch.Tensor:
    """This part of the next global batch: sequences that count up, each with a start and a stride of its own."""
    start = torch.randint(VOCABULARY, (SEQUENCES, 1), generator=source)
    stride = torch.randint(1, 4, (SEQUENCES, 1), generator=source)
    return ((start + stride * torch.arange(LENGTH + 1)) % VOCABULARY).tensor_split(parts)[part]


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    """The mean loss over all ranks, after one optimizer step."""
    loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@contextmanager
def process_group() -> Iterator[None]:
    """The ranks that torchrun has started, connected; and at the end taken apart in good order."""
    dist.init_process_group("gloo")
    yield
    # Without these two, torch with gloo now and then aborts a rank at its exit, after all work is done.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def arguments(description: str | None) -> tuple[Path, Path | None]:
    """Where to save, and what to resume, from the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="where to save")
    parser.add_argument("--resume", type=Path, metavar="PATH", help="a checkpoint to start from, of any of these jobs")
    parsed = parser.parse_args()
    return parsed.checkpoint, parsed.resume
