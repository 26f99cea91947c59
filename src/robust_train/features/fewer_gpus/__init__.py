"""Training continues on fewer GPUs, if the user allows it."""

from robust_train.features.fewer_gpus.model import FewerGpusKeys
from robust_train.model.feature import Feature

FEATURE = Feature("fewer_gpus", keys=(FewerGpusKeys,))
