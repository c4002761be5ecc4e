"""The training of a small hybrid target with a multi-token-prediction layer, and its tokens per pass.

`python training/mtp/train_mtp.py build/mtp` writes a checkpoint named as Qwen3.5's, of three gated delta nets and one attention
layer, from the bundled pair's corpus and tokenizer, and prints its tokens per pass with
`--draft mtp`; with `--json FILE` these and the machine become a file.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "pair"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import torch
import typer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.modeling_layers import MtpModel

import command
import shoal
from pair_corpus import CorpusSize, build_corpus, pack
from problems.generator import generate
from provenance import require_place, write_results
from shoal.bench.machine import machine
from shoal.models.mtp_layer import Beside
from shoal.models.sources import bundled
from shoal.train.own_samples import Windows

SIZE = CorpusSize(problems=12_000, stdlib_characters=400_000)
LENGTH, BATCH, RATE = 128, 16, 4e-3
PUBLISHED = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}


def config() -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=2048,
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=48,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        eos_token_id=0,
        pad_token_id=4,
        mtp_num_hidden_layers=1,
    )


def losses(model: Any, layer: Any, tokens: Tensor) -> list[Tensor]:
    """Computes the loss of the target, of the layer on its states, and of the layer on its own states."""
    out = model(tokens, use_cache=False, output_hidden_states=True)
    found = [cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())]
    states = out.hidden_states[-1]
    for ahead in (1, 2):
        fed = tokens[:, ahead:]
        positions = torch.arange(ahead, tokens.shape[1])[None]
        states = layer.forward_layer(0, states[:, :-1], positions, None, input_ids=fed)
        said = layer._project_to_logits(states[:, :-1])
        found.append(cross_entropy(said.flatten(0, 1), fed[:, 1:].flatten()))
    return found


def save(model: Any, layer: Any, directory: Path) -> None:
    """Writes the checkpoint; the layer's tensors have the names of Qwen3.5."""
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in layer.layers[0].state_dict().items():
        outer = PUBLISHED.get(name.removesuffix(".weight"))
        place = name.replace("mtp_block.", "layers.0.") if outer is None else f"{outer}.weight"
        tensors[f"mtp.{place}"] = tensor.contiguous()
    save_file(tensors, file, {"format": "pt"})
    for file in bundled("target").glob("*token*"):
        shutil.copy(file, directory)


def measure(directory: Path) -> list[dict[str, Any]]:
    """Prints tokens per pass at n = 8, T = 0.8, for prompts of held-out constants; returns the counts."""
    rows: list[dict[str, Any]] = []
    print("lookahead  rounds  tokens per pass and row  drafted  accepted")
    prompts = [problem.prompt for problem in generate(1, 12, "constants")]
    with shoal.load(directory, "mtp", dtype="float32") as pair:
        for lookahead in ("off", 1, 2, 3, 5):
            stats = pair.generate(prompts, 8, max_new_tokens=64, temperature=0.8, lookahead=lookahead).stats
            rows.append(
                {
                    "lookahead": lookahead,
                    "rounds": stats.rounds,
                    "tokens per pass and row": stats.acceptance_length,
                    "drafted": stats.drafted,
                    "accepted": stats.accepted,
                }
            )
            print(f"{lookahead!s:9} {stats.rounds:7} {stats.acceptance_length:24.2f} {stats.drafted:8} {stats.accepted:9}")
    return rows


def main(
    directory: Path,
    steps: int = 300,
    to: Annotated[Path | None, typer.Option("--json", help="write the counts")] = None,
) -> None:
    """Trains, saves and measures."""
    require_place(to)
    train(directory, steps)
    rows = measure(directory)
    if to is not None:
        write_results(to, {"machine": machine(torch.device("cpu")), "training steps": steps, "rows": rows})


def train(directory: Path, steps: int) -> None:
    """Trains target and layer, and writes the checkpoint."""
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(config())
    layer = MtpModel(Beside(model, directory), 1)
    tokenizer = Tokenizer.from_file(str(bundled("target") / "tokenizer.json"))
    windows = Windows(pack(build_corpus(SIZE, 0).train, tokenizer), LENGTH, BATCH, 0)
    parameters = {id(one): one for one in [*model.parameters(), *layer.layers.parameters()]}
    own = sum(one.numel() for one in layer.layers.parameters())
    print(f"{sum(one.numel() for one in parameters.values()):,} parameters, {own:,} of the layer", flush=True)
    optimizer = torch.optim.AdamW(parameters.values(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
    )
    started = time.perf_counter()
    for step in range(steps):
        found = losses(model, layer, torch.from_numpy(windows[step]))
        sum(found).backward()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        if step % 50 == 0 or step == steps - 1:
            said = " ".join(f"{one.item():.3f}" for one in found)
            print(f"step {step}: losses {said}, {time.perf_counter() - started:.0f} s", flush=True)
    directory.mkdir(parents=True, exist_ok=True)
    save(model.eval(), layer, directory)


if __name__ == "__main__":
    command.run(main)
