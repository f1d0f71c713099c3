"""`python -m visattn`."""

from visattn.cli import main

main()
