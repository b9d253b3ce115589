"""`python -m forgekeeper.cli` is `forgekeeper`."""

from forgekeeper.cli import main

main()
