"""Bytes on disk: digests, private files, objects, partial files, SQLite."""
