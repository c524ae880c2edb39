"""One reader per source: files as their owners lay them out, read in place; nothing is ever downloaded."""
