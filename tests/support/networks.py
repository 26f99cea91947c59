"""Small networks that several tests train."""

import random

from torch import nn


class Noisy(nn.Module):
    """Buffers that change, draws in the forward pass."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3)
        )

    def forward(self, x):
        return self.layers(x * random.random())
