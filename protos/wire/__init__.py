"""Bytes on the wire: chunks, update files, receipts, task keys, status codes."""
