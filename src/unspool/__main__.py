"""`python -m unspool` is `unspool`."""

from unspool.cli import main

main()
