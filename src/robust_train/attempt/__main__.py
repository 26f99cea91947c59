"""``python -m robust_train.attempt``: what the launcher starts for an attempt or a rank."""

import os
import sys

if __name__ == "__main__":
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    # The folder of this file, or with -m the working directory, holds no modules to import. Under
    # -I or -P neither is there.
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        del sys.path[0]

    from robust_train.attempt.interpreter import main

    main()
