"""A script of transformers' Trainer as people write them: it saves, and goes on from what it saved. It knows nothing of resilient.

python examples/transformers_trainer.py --steps 20
torchrun --nproc_per_node 2 examples/transformers_trainer.py --steps 40     # goes on at step 20
resilient run --procs 2 examples/transformers_trainer.py --steps 2000       # and is started again whatever happens to it
"""

import argparse
import os
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

WORDS, LENGTH = 64, 32


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Texts that are a function of their index: each word follows from the two before it."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = [index % WORDS, index // WORDS % WORDS]
        while len(words) < LENGTH:
            words.append((words[-1] + 3 * words[-2] + 1) % WORDS)
        text = torch.tensor(words)  # (length,)
        return {"input_ids": text, "labels": text}


def newest_checkpoint(out: Path) -> str | None:
    """The newest one that was finished: the Trainer writes into the folder itself, rank 0 its state last, and each rank its own."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    needed = ["trainer_state.json", *([f"rng_state_{rank}.pth" for rank in range(ranks)] if ranks > 1 else [])]
    found = [path for path in out.glob("checkpoint-*") if all((path / name).exists() for name in needed)]
    return str(max(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))) if found else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/transformers"))
    args = parser.parse_args()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2))
    training = TrainingArguments(
        output_dir=str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        save_steps=args.save_steps,
        save_total_limit=3,
        logging_steps=10,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model, training, train_dataset=Sentences())
    trainer.train(resume_from_checkpoint=newest_checkpoint(args.out))
    trainer.save_model()


if __name__ == "__main__":
    main()
