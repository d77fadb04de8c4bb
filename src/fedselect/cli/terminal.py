"""Where the commands print."""

from fedselect.runs import tables

console = tables.terminal()


def say(text: str) -> None:
    """A line as it is: neither wrapped nor coloured."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)
