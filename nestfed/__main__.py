"""`python -m nestfed` is the command line."""

from nestfed.cli.main import main

main()
