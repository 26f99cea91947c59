"""A library that initialises the CUDA driver when it is imported."""

import ctypes
import os

ctypes.CDLL("libcuda.so.1").cuInit(0)
VISIBLE = os.environ["CUDA_VISIBLE_DEVICES"]


def train(cfg):
    return VISIBLE
