"""`python -m cli` is `forgekeeper`."""

from forgekeeper.cli import main

main()
