"""`python -m nestfed` is the command line."""

from nestfed.cli import main

main()
