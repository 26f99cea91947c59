import starts_cuda


def train(cfg):
    return starts_cuda.visible()
