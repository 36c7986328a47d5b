"""`python -m lipcert`."""

from lipcert.cli import main

main()
