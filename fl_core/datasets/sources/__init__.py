"""One reader per source."""
