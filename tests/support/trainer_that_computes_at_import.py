"""Masks, tables and models at the top of the module, as users write them."""

import torch
from torch import nn

MASK = torch.tril(torch.ones(1024, 1024))
TABLE = torch.linspace(0, 1, 100_000).sin()
PRODUCT = MASK @ MASK
MODEL = nn.Transformer(64, 2, 1, 1)


def train(cfg):
    return float((torch.ones(512, 512) @ torch.ones(512, 512)).sum()) + float(TABLE[0])
