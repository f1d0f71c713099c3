"""Pages of results: tables and figures in one HTML file without scripts."""
