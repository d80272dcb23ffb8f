"""Train the embedded model from nothing and write its FP8 checkpoint.

    python -m model.embedded.train --stdlib DIR --out DIR --minutes M

`--minutes` bounds the whole run: tokenizer, training, export and the held-out evaluation. A few
minutes on a large GPU give the shipped model; on a CPU use `--size tiny` to try the script out.
"""

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from .architecture import SIZES, build_model
from .balance import LoadCounter
from .batches import TrainingRows, pack
from .corpus import Split, default_stdlib, find_sources, split, total_bytes
from .evaluate import evaluate_heldout
from .export import export
from .optimizer import MasterOptimizer, OptimizerSettings
from .schedule import Schedule
from .tokenizer import encode_files, save_tokenizer, train_tokenizer


@dataclass(frozen=True)
class TrainSettings:
    """What a run may vary."""

    size: str = "embedded"
    minutes: float = 9.0
    epochs: float = 60.0
    rows: int = 16
    length: int = 2048
    dropout: float = 0.2
    gamma: float = 1e-3
    reserve: float = 45.0
    evaluations: int = 60
    seed: int = 0


def add_dropout(model: nn.Module, p: float) -> None:
    """Drop out, in training, the embedding and what each attention and MLP adds to the stream."""

    def drop(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        return F.dropout(output, p, module.training)

    for name, module in model.named_modules():
        if name.endswith((".embed_tokens", ".o_proj", ".mlp")):
            module.register_forward_hook(drop)


class Run:
    """One training run: its data, model, optimizer, and the best state so far."""

    def __init__(self, settings: TrainSettings, parts: Split, out: Path) -> None:
        self.started = time.perf_counter()
        self.settings, self.parts, self.out = settings, parts, out
        self.config = SIZES[settings.size]
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(settings.seed)
        out.mkdir(parents=True, exist_ok=True)

        tokenizer = train_tokenizer((f.text for f in parts.train), self.config["vocab_size"])
        save_tokenizer(tokenizer, out, self.config["max_position_embeddings"])
        documents = encode_files(tokenizer, [f.text for f in parts.train])
        self.validation = encode_files(tokenizer, [f.text for f in parts.validation])
        self.batches = TrainingRows(
            documents, settings.length, settings.rows, self.device, settings.seed
        )
        epoch = self.batches.steps_per_epoch
        self.say(f"{self.batches.tokens} training tokens, {epoch} steps an epoch")

        experts = "grouped_mm" if self.device.type == "cuda" else "eager"
        self.model = build_model(self.config, torch.bfloat16, experts).to(self.device)
        add_dropout(self.model, settings.dropout)
        self.optimizer = MasterOptimizer(self.model, OptimizerSettings())
        self.counter = LoadCounter(self.model)
        self.best = float("inf")
        self.best_state: dict[str, Tensor] = {}
        self.curve: list[dict[str, float]] = []

    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.started

    def say(self, text: str) -> None:
        """One line of log."""
        print(f"[{self.elapsed():6.1f} s] {text}", flush=True)

    def step(self, inputs: Tensor, targets: Tensor, lr_scale: float, fp8: bool) -> Tensor:
        """One update; returns the loss in nats a token (on the device: no wait)."""
        logits = self.model(input_ids=inputs, use_cache=False).logits  # [rows, length, V]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        self.optimizer.step(lr_scale)
        self.optimizer.write_back(fp8)
        self.counter.update_biases(self.settings.gamma * min(1.0, 2 * lr_scale))
        return loss.detach()

    def probe(self, steps: int = 20) -> float:
        """Seconds a step, after a few to warm up. These steps train too, at a low rate."""
        batches = iter(self.batches)
        for number in range(5 + steps):
            if number == 5:
                self._wait()
                start = time.perf_counter()
            self.step(*next(batches), lr_scale=0.02, fp8=False)
        self._wait()
        return (time.perf_counter() - start) / steps

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def validate(self) -> float:
        """Bits per byte of the validation files, in rows of the training's length."""
        stream = torch.tensor(
            [t for d in self.validation for t in d], dtype=torch.int64, device="cpu"
        )
        inputs, targets = pack(stream, min(self.settings.length, stream.numel()))
        self.model.eval()
        nats = 0.0
        with torch.no_grad():
            for start in range(0, inputs.shape[0], self.settings.rows):
                part = slice(start, start + self.settings.rows)
                logits = self.model(input_ids=inputs[part].to(self.device), use_cache=False).logits
                wanted = targets[part].to(self.device).flatten()
                logits = logits.flatten(0, 1).float()
                nats += float(F.cross_entropy(logits, wanted, reduction="sum"))
        self.model.train()
        self.counter.reset()
        share = targets.numel() / stream.numel()
        return nats / 0.6931471805599453 / (total_bytes(self.parts.validation) * share)

    def state(self) -> dict[str, Tensor]:
        """Masters and router biases under transformers' names, in its order, on the CPU."""
        masters = self.optimizer.masters()
        return {
            name: masters[name] if name in masters else value.cpu().clone()
            for name, value in self.model.state_dict().items()
        }

    def train(self) -> dict[str, Any]:
        """The whole schedule. Keeps the state that was best on the validation files."""
        s = self.settings
        self.model.train()
        per_step = self.probe()
        reserve = min(s.reserve, 0.3 * 60 * s.minutes)
        seconds = 60 * s.minutes - reserve - self.elapsed()
        steps = max(20, min(int(s.epochs * self.batches.steps_per_epoch), int(seconds / per_step)))
        schedule = Schedule(steps, seconds)
        self.say(f"{per_step * 1e3:.1f} ms/step, {steps} steps in at most {seconds:.0f} s")
        every = max(1, steps // s.evaluations)
        began, step, saved = self.elapsed(), 0, self.elapsed()
        losses: list[Tensor] = []
        lowest = float("inf")
        for inputs, targets in self.batches:
            gone = self.elapsed() - began
            decaying = schedule.decaying(step, gone)
            losses.append(self.step(inputs, targets, schedule.scale(step, gone), fp8=decaying))
            step += 1
            over = schedule.progress(step, self.elapsed() - began) >= 1.0
            if step % every and not over:
                continue
            value = self.validate()
            self._log(step, losses, value, schedule.scale(step, gone))
            losses.clear()
            if not decaying and value > 1.01 * lowest:
                self.say("validation rises: the decay begins")
                schedule.decay_from_now(step)
            lowest = min(lowest, value)
            if (decaying or over) and value < self.best:
                self.best, self.best_state = value, self.state()
                if self.elapsed() - saved > 100:
                    export(self.best_state, self.config, self.out)
                    saved = self.elapsed()
            if over:
                break
        tokens = step * s.rows * s.length
        return {
            "steps": step,
            "tokens_seen": tokens,
            "epochs": round(tokens / self.batches.tokens, 2),
            "training_tokens": self.batches.tokens,
            "training_seconds": round(self.elapsed() - began, 1),
            "bits_per_byte_validation": round(self.best, 4),
        }

    def _log(self, step: int, losses: list[Tensor], value: float, lr_scale: float) -> None:
        loss = float(torch.stack(losses).mean())
        epoch = step / self.batches.steps_per_epoch
        point = {"step": step, "epoch": epoch, "loss": loss, "validation": value, "lr": lr_scale}
        self.curve.append({k: round(v, 4) for k, v in point.items()})
        self.say(
            f"step {step} epoch {epoch:.1f} loss {loss:.4f} validation {value:.4f} bit/byte "
            f"lr {lr_scale:.3f}"
        )

    def finish(self, result: dict[str, Any]) -> None:
        """Export the best state, measure its bfloat16 form on the held-out files, write the log."""
        export(self.best_state, self.config, self.out)
        self.say("exported")
        plain = build_model(self.config, torch.float32)
        for name, value in self.best_state.items():
            if not name.endswith("e_score_correction_bias"):
                self.best_state[name] = value.bfloat16().float()
        plain.load_state_dict(self.best_state)
        bpb, _, _ = evaluate_heldout(plain.eval().to(self.device), self.out, self.parts.heldout)
        gpu = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        result |= {
            "bits_per_byte_bf16": round(bpb, 4),
            "settings": asdict(self.settings),
            "optimizer": asdict(self.optimizer.settings),
            "device": gpu,
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "files": {k: len(getattr(self.parts, k)) for k in ("train", "validation", "heldout")},
            "bytes": {
                k: total_bytes(getattr(self.parts, k)) for k in ("train", "validation", "heldout")
            },
            "total_seconds": round(self.elapsed(), 1),
            "curve": self.curve,
        }
        (self.out / "training.json").write_text(json.dumps(result, indent=1) + "\n")
        self.say(f"held-out {bpb:.4f} bit/byte in bfloat16")


def main() -> None:
    """The command line."""
    defaults = TrainSettings()
    parser = argparse.ArgumentParser(description="Train the embedded model.")
    parser.add_argument("--stdlib", type=Path, default=default_stdlib())
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=sorted(SIZES), default=defaults.size)
    for name in ("minutes", "epochs", "dropout", "gamma", "reserve"):
        parser.add_argument(f"--{name}", type=float, default=getattr(defaults, name))
    for name in ("rows", "length", "evaluations", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))
    args = vars(parser.parse_args())
    stdlib, out = args.pop("stdlib"), args.pop("out")
    run = Run(TrainSettings(**args), split(find_sources(stdlib)), out)
    run.finish(run.train())


if __name__ == "__main__":
    main()
