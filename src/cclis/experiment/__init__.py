"""What happens in a run, in order, from settings to report."""
