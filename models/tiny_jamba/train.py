"""Train tiny_jamba on this machine's processor: `python models/tiny_jamba/train.py --fetch --out DIR`.

Deterministic for a given seed, number of steps and set of library versions. The budget is in steps, not
in time. See README.md for what a run takes and yields.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import corpus
import torch
from scoring import HELD_OUT, bits_per_byte, chunked_scan, held_out_source
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import spawn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig, JambaConfig, JambaForCausalLM, PreTrainedTokenizerFast

# One single-threaded process per core: they meet once a step, where threads would meet at every operation.
WORKERS = 2
SPECIALS = ("<|pad|>", "<|bos|>", "<|eos|>")
# (share of the steps, sequences, length): most of the budget on short windows, the end on long ones.
PHASES = ((0.9, 8, 512), (0.1, 2, 4096))
PYTHON_SHARE = 0.6


def build_config() -> JambaConfig:
    return JambaConfig(
        vocab_size=256 + len(SPECIALS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        attn_layer_period=4,
        attn_layer_offset=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=1,
        num_experts_per_tok=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=1,
        max_position_embeddings=65536,
        tie_word_embeddings=True,
        pad_token_id=256,
        bos_token_id=corpus.BOS,
        eos_token_id=corpus.EOS,
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and the id of a byte is its value."""
    backend = Tokenizer(models.BPE(vocab={char: byte for byte, char in _byte_characters().items()}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIALS))
    pad, bos, eos = SPECIALS
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        # Text that happens to spell a special token stays text.
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=65536,
    )


def _byte_characters() -> dict[int, str]:
    """The printable stand-in that the ByteLevel pre-tokenizer uses for each byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def build_model(config: JambaConfig) -> JambaForCausalLM:
    model = JambaForCausalLM(config)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "dt_proj" not in name and "lm_head" not in name:
            nn.init.normal_(module.weight, std=module.in_features**-0.5 / (4 if "out" in name or "down" in name else 1))
        if name.endswith("dt_proj"):
            # Time steps spread evenly in log scale over 0.001 to 0.1 (Gu and Dao 2023, section 3.6).
            step = torch.exp(torch.rand(module.out_features) * math.log(100) + math.log(0.001))
            with torch.no_grad():
                module.bias.copy_(step + torch.log(-torch.expm1(-step)))
            nn.init.uniform_(module.weight, -(module.in_features**-0.5), module.in_features**-0.5)
    return model


def batches(streams: dict[str, Tensor], steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    python, documentation = streams["python"], streams["documentation"]
    for share, rows, length in PHASES:
        for _ in range(round(share * steps)):
            picks = torch.rand(rows, 2, generator=generator).tolist()
            windows = []
            for source, place in picks:
                stream = python if source < PYTHON_SHARE else documentation
                start = int(place * (len(stream) - length - 1))
                windows.append(stream[start : start + length + 1])
            yield torch.stack(windows).long()


def build_optimizers(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        inner = parameter.ndim == 2 and not any(word in name for word in ("embed", "lm_head", "A_log", "dt_proj"))
        (matrices if inner else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, weight_decay=0.0, betas=(0.9, 0.97)),
    ]


def schedule(step: int, steps: int) -> float:
    """Linear warm-up over 2 % of the run, then a cosine down to 2 %."""
    warm = max(1, steps // 50)
    if step < warm:
        return (step + 1) / warm
    return 0.02 + 0.49 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def train(model: nn.Module, streams: dict[str, Tensor], options: argparse.Namespace, rank: int) -> None:
    generator = torch.Generator().manual_seed(options.seed + 1)
    optimizers = build_optimizers(model, options.rate)
    parameters = list(model.parameters())
    model.train()
    total = sum(round(share * options.steps) for share, _, _ in PHASES)
    bar = tqdm(batches(streams, options.steps, generator), total=total, mininterval=5, disable=rank > 0)
    smooth = 8.0
    for step, ids in enumerate(bar):
        mine = ids[rank::WORKERS]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(mine[:, :-1], use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        shared = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None] + [loss.detach()[None]])
        distributed.all_reduce(shared)
        shared /= WORKERS
        for parameter, gradient in zip(parameters, shared.split([p.numel() for p in parameters] + [1]), strict=False):
            parameter.grad = gradient.view_as(parameter)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = options.rate * schedule(step, total)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        smooth += (float(shared[-1]) / math.log(2) - smooth) * max(0.02, 1 / (step + 1))
        bar.set_postfix_str(f"{smooth:.3f} bits per byte", refresh=False)


def worker(rank: int, options: argparse.Namespace, documentation: Path, rendezvous: str) -> None:
    """One of the processes that share every batch; each runs on one thread, and all end with the same weights."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(options.seed)
    distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORKERS)
    streams = corpus.load(documentation, torch.Generator().manual_seed(options.seed))
    model = build_model(build_config())
    if rank == 0:
        sizes = ", ".join(f"{name} {len(stream):,} bytes" for name, stream in streams.items())
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters; {sizes}", flush=True)
    began, began_cpu = time.perf_counter(), time.process_time()
    with chunked_scan():
        train(model, streams, options, rank)
    if rank == 0:
        took, cpu = time.perf_counter() - began, time.process_time() - began_cpu
        print(f"trained in {took:.0f} s ({cpu:.0f} s of processor time in each of {WORKERS} workers)", flush=True)
        save(model, options.out)
    distributed.destroy_process_group()


def save(model: Any, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).eval().save_pretrained(out)
    GenerationConfig(
        bos_token_id=corpus.BOS, eos_token_id=corpus.EOS, pad_token_id=256, do_sample=False
    ).save_pretrained(out)
    build_tokenizer().save_pretrained(out)
    for path in out.iterdir():
        path.chmod(0o644)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train tiny_jamba.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights and the tokenizer")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--docs", type=Path, help="folder with the documentation's .rst.txt sources")
    parser.add_argument("--fetch", action="store_true", help=f"download {corpus.PACKAGE} if it is not installed")
    return parser.parse_args(arguments)


def report(folder: Path, documentation: Path) -> None:
    """Measured on the saved weights, as a user loads them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    window = json.loads(HELD_OUT.read_text())["window"]
    print(f"held-out standard library: {bits_per_byte(model, held_out_source(), window):.4f} bits per byte")
    held_out = corpus.held_out_documentation(documentation)
    print(f"held-out documentation: {bits_per_byte(model, held_out, window):.4f} bits per byte")


def main() -> int:
    options = parse_arguments()
    try:
        documentation = corpus.find_documentation(options.docs, fetch=options.fetch)
    except corpus.MissingData as missing:
        print(f"train.py: {missing}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        spawn(worker, (options, documentation, rendezvous), nprocs=WORKERS)
    torch.set_num_threads(WORKERS)
    report(options.out, documentation)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
