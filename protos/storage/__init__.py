"""Bytes on disk: digests, private files, SQLite, partial files."""
