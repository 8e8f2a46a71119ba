"""Studies: the runs that a table or a figure needs, and its page."""
