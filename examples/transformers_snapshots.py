"""The script of transformers_trainer.py with `ResilientCallback`: no step is lost that had a snapshot in RAM or on disk.

python examples/transformers_snapshots.py --steps 20
torchrun --nproc_per_node 2 examples/transformers_snapshots.py --steps 40
resilient run --procs 2 examples/transformers_snapshots.py --steps 2000
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers_trainer import LENGTH, WORDS, Sentences, newest_checkpoint

from resilient.integrations.transformers import ResilientCallback


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/transformers-snapshots"))
    args = parser.parse_args()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2))
    training = TrainingArguments(
        output_dir=str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        save_steps=args.save_steps,
        save_total_limit=3,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    callback = ResilientCallback()
    trainer = Trainer(model, training, train_dataset=Sentences(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume(trainer, otherwise=newest_checkpoint(args.out)))
    trainer.save_model()


if __name__ == "__main__":
    main()
