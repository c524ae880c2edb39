"""Bytes on the wire: chunks, tensor files, receipts, status codes."""
