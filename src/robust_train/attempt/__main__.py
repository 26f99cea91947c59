"""``python -m robust_train.attempt``: what the launcher starts for an attempt or a rank."""

import os
import sys

if __name__ == "__main__":
    # the folder of this file, or with -m the working directory: neither holds modules to import
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    del sys.path[0]

    from robust_train.attempt.interpreter import main

    main()
