"""Its library takes long to import."""

import takes_long_to_import


def train(cfg):
    return takes_long_to_import.__name__
