"""`python -m cli` is `forgekeeper`."""

from cli import main

main()
