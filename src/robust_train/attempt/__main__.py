"""``python -m robust_train.attempt``: the process of an attempt, or of one of its ranks.

``children.interpreters`` starts it, in the launcher.
"""

import os
import sys

if __name__ == "__main__":
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    # Python puts the folder of this file first, or with -m the working directory. No module should
    # be imported from there. With -I or -P, Python adds neither.
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        del sys.path[0]

    from robust_train.attempt.interpreter import main

    main()
