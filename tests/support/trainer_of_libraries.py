import reads_the_environment


def train(cfg):
    return reads_the_environment.VALUE
