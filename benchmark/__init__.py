"""One script per question; each prints a table and, as its last line, one JSON object."""
