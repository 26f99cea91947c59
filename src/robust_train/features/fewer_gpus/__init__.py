"""Training on fewer GPUs than requested, if the user allows it (``min_num_gpus``)."""

from robust_train.features.fewer_gpus.model import FewerGpusKeys
from robust_train.model.feature import Feature

FEATURE = Feature("fewer_gpus", keys=(FewerGpusKeys,))
