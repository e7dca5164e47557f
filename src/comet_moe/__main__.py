"""``python -m comet_moe`` is ``comet-moe``."""

from comet_moe.cli import main

main()
