"""What a run looks like: a table in the terminal, a page in the browser."""
