"""``python -m comet_moe`` is ``comet-moe``."""

import sys

try:
    from comet_moe.cli import main

    main()
except KeyboardInterrupt:  # Ctrl-C in the first moment
    sys.exit(130)
