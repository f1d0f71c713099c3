"""Entry point of `python -m visattn`."""

from visattn.cli import main

main()
