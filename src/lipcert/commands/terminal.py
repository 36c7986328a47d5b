"""The terminal that all commands print to."""

from rich.console import Console

console = Console()
