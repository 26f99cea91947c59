"""A tiny language model on ten of Shakespeare's sonnets with transformers, under the launcher::

python train_robust.py trainer._target_=examples.transformers_sonnets.train.train training.epochs=2
"""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from robust_train.integrations.transformers import fit, training_arguments

LENGTH = 64  # bytes in a sample


def windows(stride):
    """Pieces of the text, byte by byte, so that no tokenizer is needed."""
    text = torch.tensor(list(Path(__file__).with_name("sonnets.txt").read_bytes()))
    return [{"input_ids": ids, "labels": ids} for ids in text.unfold(0, LENGTH, stride)]


def train(cfg, run):
    """The launcher calls this for each attempt."""
    set_seed(cfg.seed)
    width, dropout = cfg.model.width, cfg.model.dropout
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=LENGTH,
            n_embd=width,
            n_layer=2,
            n_head=4,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            resid_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    arguments = TrainingArguments(
        **training_arguments(cfg, run),
        num_train_epochs=cfg.training.epochs,
        learning_rate=cfg.training.lr,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
    )
    samples = windows(stride=8)
    is_held_out = [number % 10 == 0 for number in range(len(samples))]
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[s for s, out in zip(samples, is_held_out, strict=True) if not out],
        eval_dataset=[s for s, out in zip(samples, is_held_out, strict=True) if out],
    )
    return fit(trainer, cfg=cfg, run=run, metric="eval_loss")
