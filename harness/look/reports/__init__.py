"""Reports for the terminal: status, summary, costs, comparisons."""
