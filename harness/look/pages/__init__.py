"""HTML pages: the report, the index of runs, charts."""
