"""The protocol between coordinator and silos.

consilium/  generated from `consilium/v1/federation.proto` by `make protos`
wire/       bytes on the wire: chunks, update files, receipts, status codes
"""
