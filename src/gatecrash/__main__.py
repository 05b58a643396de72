"""`python -m gatecrash` is the command line."""

from gatecrash.cli import main

main()
