"""Trains a small byte-level GPT on the sources of Python's standard library, and checkpoints it with objckpt.

    python tools/train_demo.py run --url s3://bucket/demo --losses l.jsonl    trains, or goes on where it was killed
    python tools/train_demo.py compare reference.jsonl l.jsonl                to the last bit; exit code 1 if not equal

Everything that decides the next loss is in the checkpoint: weights, optimizer, schedule, both random generators. Each
loss is written as a hexadecimal float, so that the comparison is exact. One thread, so that sums have one order.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from objckpt import Checkpointer

CONTEXT, BATCH, WIDTH, HEADS, LAYERS, DROPOUT = 96, 8, 192, 4, 4, 0.1
TEXT_BYTES = 4 << 20


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on the normalised residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + functional.dropout(self.out(seen.transpose(1, 2).reshape(x.shape)), DROPOUT, self.training)
        return x + functional.dropout(self.mlp(self.norm2(x)), DROPOUT, self.training)


class GPT(nn.Module):
    """Predicts the next byte; the output layer is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Batches:
    """Random windows of the text. Its state, and with it the place in the data, is that of its generator."""

    def __init__(self, text: Tensor) -> None:
        self.text, self.generator = text, torch.Generator().manual_seed(1)

    def next(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.text) - CONTEXT - 1, (BATCH,), generator=self.generator)
        window = torch.stack([self.text[s : s + CONTEXT + 1] for s in starts.tolist()]).long()
        return window[:, :-1], window[:, 1:]


class Randomness:
    """Both generators as one object of the training state: dropout's (global) and the data's."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def state_dict(self) -> dict[str, Tensor]:
        return {"dropout": torch.get_rng_state(), "batches": self.batches.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        torch.set_rng_state(state["dropout"])
        self.batches.generator.set_state(state["batches"])


def standard_library() -> Tensor:
    """The first bytes of the standard library's sources, in a fixed order, as uint8."""
    root, text = Path(sysconfig.get_path("stdlib")), bytearray()
    for path in sorted(root.rglob("*.py")):
        if len(text) < TEXT_BYTES and not {"site-packages", "test", "tests"} & set(path.parts):
            text += path.read_bytes()
    return torch.frombuffer(text, dtype=torch.uint8)[:TEXT_BYTES]


def say(line: str) -> None:
    print(line, flush=True)  # quickstart.sh acts on these lines


def run(url: str, losses: Path, steps: int, every: int) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = GPT()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.LambdaLR(
        optim, lambda n: min(1, (n + 1) / 10) * 0.5 * (1 + math.cos(math.pi * n / steps))
    )
    batches = Batches(standard_library())
    state: dict[str, Any] = {
        "model": model,
        "average": average,
        "optim": optim,
        "sched": sched,
        "random": Randomness(batches),
    }

    with Checkpointer(url) as ckpt, losses.open("a") as out:
        resumed = ckpt.restore(state)
        say("starting fresh" if resumed is None else f"resumed from step {resumed}")
        for step in range((resumed or 0) + 1, steps + 1):
            tokens, targets = batches.next()
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            optim.zero_grad()
            loss.backward()
            optim.step()
            sched.step()
            average.update_parameters(model)
            out.write(json.dumps({"step": step, "loss": loss.item().hex()}) + "\n")
            out.flush()
            if step % every == 0 or step == steps:
                handle = ckpt.save(step, state)
                where = "committed" if handle.done() else "upload in flight"
                say(
                    f"step {step} loss {loss.item():.4f} | save blocked {handle.stats.blocked_s * 1e3:.0f} ms | {where}"
                )
    say(f"done: {steps} steps, the last checkpoint is committed")


def read(path: Path) -> dict[int, str]:
    """Losses by step. A step that was computed again after a resume must have given the same loss."""
    found: dict[int, str] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if found.setdefault(row["step"], row["loss"]) != row["loss"]:
            raise SystemExit(f"{path}: step {row['step']} was computed twice with different losses")
    return found


def compare(reference: Path, other: Path) -> int:
    expected, got = read(reference), read(other)
    differing = sorted(step for step in expected.keys() | got.keys() if expected.get(step) != got.get(step))
    if differing or not expected:
        say(f"loss curves differ, first at step {differing[0] if differing else 'none: both are empty'}")
        return 1
    last = max(expected)
    shown = f"step {last}: {float.fromhex(expected[last]):.6f} = {expected[last]}"
    say(f"{len(expected)} losses are equal to the last bit; {shown}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    train = commands.add_parser("run")
    train.add_argument("--url", required=True)
    train.add_argument("--losses", type=Path, required=True)
    train.add_argument("--steps", type=int, default=60)
    train.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    both = commands.add_parser("compare")
    both.add_argument("reference", type=Path)
    both.add_argument("other", type=Path)
    args = parser.parse_args()
    if args.command == "compare":
        return compare(args.reference, args.other)
    run(args.url, args.losses, args.steps, args.every)
    return 0


if __name__ == "__main__":
    sys.exit(main())
